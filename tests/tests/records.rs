//! Optimizer state goes through every recorder of Burn as it is: also through those of half
//! precision, in whose f16 second moments become 0, after which the first step is far too large.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::record::{
    BinBytesRecorder, BinFileRecorder, BinGzFileRecorder, DoublePrecisionSettings,
    FullPrecisionSettings, HalfPrecisionSettings, JsonGzFileRecorder, NamedMpkBytesRecorder,
    NamedMpkFileRecorder, NamedMpkGzFileRecorder, PrecisionSettings, PrettyJsonFileRecorder,
    Record, Recorder,
};
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Tensor};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_decorator::module::{for_each_float, map_floats};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    HostAdamWConfig, OffloadConfig, ReduceOverRanks, Sharded, SingleRank, Stage, ZeroSettings,
};

type B = Sharded<Autodiff<Flex>>;

#[derive(Module, Debug)]
struct Net<B: Backend> {
    a: Linear<B>,
    b: Linear<B>,
}

impl<B: AutodiffBackend> Net<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 7);
        Self {
            a: LinearConfig::new(4, 8).init(&device),
            b: LinearConfig::new(8, 1).init(&device),
        }
    }

    /// Its gradients are as small as at the end of a training.
    fn loss(&self, step: usize) -> Tensor<B, 1> {
        let x: Vec<f32> = (0..32)
            .map(|i| ((i + step * 7) as f32 * 0.37).sin())
            .collect();
        let x = Tensor::<B, 1>::from_floats(x.as_slice(), &Default::default()).reshape([8, 4]);
        (self.b.forward(gelu(self.a.forward(x))) - 0.3)
            .square()
            .mean()
            * 1e-3
    }
}

const LR: f64 = 0.01;

fn train<O: Optimizer<Net<B>, B>>(
    optimizer: &mut O,
    mut net: Net<B>,
    steps: Range<usize>,
) -> Net<B> {
    for step in steps {
        let gradients = GradientsParams::from_grads(net.loss(step).backward(), &net);
        net = optimizer.step(LR, net, gradients);
    }
    net
}

/// All parameters, bit for bit.
fn bits(net: &Net<B>) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for_each_float(net, |_, _, tensor| {
        let data = Tensor::<B, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(tensor));
        all.push(data.into_data().as_bytes().to_vec());
    });
    all
}

/// Saves and loads a record.
type Pass<R> = Box<dyn Fn(R) -> R>;

/// Every recorder of Burn with settings `S`.
fn recorders<S, R>(settings: &'static str) -> Vec<(String, Pass<R>)>
where
    S: PrecisionSettings + 'static,
    R: Record<B> + 'static,
{
    fn file<R, F>(recorder: F, name: &str) -> Pass<R>
    where
        R: Record<B> + 'static,
        F: Recorder<B, RecordArgs = PathBuf, LoadArgs = PathBuf, RecordOutput = ()> + 'static,
    {
        let name = name.to_owned();
        Box::new(move |record| {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join(&name);
            recorder.record(record, path.clone()).unwrap();
            recorder.load(path, &Default::default()).unwrap()
        })
    }
    let bincode: Pass<R> = Box::new(|record| {
        let recorder = BinBytesRecorder::<S>::default();
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    });
    let named: Pass<R> = Box::new(|record| {
        let recorder = NamedMpkBytesRecorder::<S>::default();
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap()
    });
    let recorders = vec![
        ("BinBytes", bincode),
        ("NamedMpkBytes", named),
        ("Bin", file(BinFileRecorder::<S>::new(), "bin")),
        ("BinGz", file(BinGzFileRecorder::<S>::new(), "bingz")),
        ("JsonGz", file(JsonGzFileRecorder::<S>::new(), "jsongz")),
        (
            "PrettyJson",
            file(PrettyJsonFileRecorder::<S>::new(), "json"),
        ),
        ("NamedMpk", file(NamedMpkFileRecorder::<S>::new(), "mpk")),
        (
            "NamedMpkGz",
            file(NamedMpkGzFileRecorder::<S>::new(), "mpkgz"),
        ),
    ];
    let named = recorders.into_iter();
    named
        .map(|(recorder, pass)| (format!("{recorder}, {settings}"), pass))
        .collect()
}

/// A training that is resumed from a record of any recorder goes on bit for bit.
fn goes_on<O>(what: &str, net: Net<B>, make: impl Fn() -> (O, Net<B>))
where
    O: Optimizer<Net<B>, B>,
    O::Record: 'static,
{
    let (mut optimizer, _) = make();
    let net = train(&mut optimizer, net, 0..30);
    let recorders = recorders::<FullPrecisionSettings, O::Record>("full")
        .into_iter()
        .chain(recorders::<HalfPrecisionSettings, _>("half"))
        .chain(recorders::<DoublePrecisionSettings, _>("double"));
    for (recorder, pass) in recorders {
        let record = pass(optimizer.to_record());
        let mut resumed = make().0.load_record(record);
        let expected = bits(&train(&mut optimizer.clone(), net.clone(), 30..32));
        let found = bits(&train(&mut resumed, net.clone(), 30..32));
        assert_eq!(found, expected, "{what}: {recorder}");
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig::new().with_epsilon(1e-8)
}

fn alone<O>(make: impl Fn() -> O) -> impl Fn() -> (O, Net<B>) {
    move || (make(), Net::new())
}

#[test]
fn state_keeps_its_type_in_every_recorder() {
    let host = || {
        OffloadConfig::new(HostAdamWConfig::default())
            .init()
            .unwrap()
    };
    let burns = || adamw().init::<B, Net<B>>();
    let accumulates = || AccumConfig::mean(1);
    // A scale that is no number of f16.
    let scaler = || {
        let init_scale = 131_072.0;
        GradScaler::new(GradScalerConfig {
            init_scale,
            ..Default::default()
        })
        .unwrap()
    };
    goes_on("on the host", Net::new(), alone(host));
    goes_on("accumulated, on the host", Net::new(), {
        alone(move || Update::new(host()).accumulate(accumulates()).unwrap())
    });
    goes_on("accumulated", Net::new(), {
        alone(move || Update::new(burns()).accumulate(accumulates()).unwrap())
    });
    goes_on("scaled", Net::new(), {
        alone(move || Update::new(burns()).scale(scaler()).unwrap())
    });
    goes_on("clipped", Net::new(), {
        alone(move || Update::new(burns()).clip_norm(1.0).unwrap())
    });
    goes_on("scaled, accumulated, clipped", Net::new(), {
        alone(move || {
            let clipped = Update::new(burns()).clip_norm(1.0).unwrap();
            let windows = clipped.accumulate(accumulates()).unwrap();
            windows.scale(scaler()).unwrap()
        })
    });
}

#[test]
fn masters_of_low_parameters_keep_their_type_in_every_recorder() {
    for low in [DType::F16, DType::BF16] {
        let net = map_floats(Net::<B>::new(), |_, _, tensor| {
            let tensor =
                Tensor::<B, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(tensor));
            let low = tensor.cast(low).detach().require_grad();
            low.into_primitive().tensor()
        });
        let host = || {
            OffloadConfig::new(HostAdamWConfig::default())
                .init()
                .unwrap()
        };
        let mut optimizer = host();
        let gradients = |net: &Net<B>, step: usize| {
            let mut gradients = GradientsParams::new();
            for_each_float(net, |_, id, tensor| {
                let tensor =
                    Tensor::<B, 1>::from_primitive(burn::tensor::TensorPrimitive::Float(tensor));
                let value = 1e-5 * (1.0 + step as f64);
                gradients.register(id, tensor.inner().zeros_like().add_scalar(value));
            });
            gradients
        };
        let mut net = net;
        for step in 0..5 {
            let gradients = gradients(&net, step);
            net = optimizer.step(LR, net, gradients);
        }
        for (recorder, pass) in recorders::<HalfPrecisionSettings, _>("half") {
            let record = Optimizer::<Net<B>, B>::to_record(&optimizer);
            let mut resumed = Optimizer::<Net<B>, B>::load_record(host(), pass(record));
            let expected = bits(&optimizer.clone().step(LR, net.clone(), gradients(&net, 5)));
            let found = bits(&resumed.step(LR, net.clone(), gradients(&net, 5)));
            assert_eq!(found, expected, "{low:?}: {recorder}");
        }
    }
}

#[test]
fn shards_keep_their_type_in_every_recorder() {
    for stage in [Stage::DataParallel, Stage::OptimizerState, Stage::Gradients] {
        let make = || {
            let group = Arc::new(SingleRank::new());
            let update = Update::new(adamw().init()).reduce(ZeroSettings::stage(stage), group);
            let mut update = update.unwrap();
            let net = update.prepare(Net::<B>::new()).unwrap();
            (update, net)
        };
        let (update, net) = make();
        drop(update);
        goes_on(&format!("stage {}", stage.number()), net, make);
    }
}

/// As an earlier version wrote it, and as Burn does.
#[test]
fn a_record_that_was_stored_in_half_precision_loads_on_the_host() {
    let burns = || adamw().init::<B, Net<B>>();
    let mut optimizer = burns();
    train(&mut optimizer, Net::new(), 0..3);

    let recorder = NamedMpkBytesRecorder::<HalfPrecisionSettings>::default();
    let device = Default::default();
    let bytes = Recorder::<B>::record(&recorder, optimizer.to_record(), ()).unwrap();
    // The host has another arithmetic, but the record is there.
    let host = OffloadConfig::new(HostAdamWConfig::default())
        .init()
        .unwrap();
    let record = Recorder::<B>::load(&recorder, bytes, &device).unwrap();
    let host = Optimizer::<Net<B>, B>::load_record(host, record);
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    let again = Optimizer::<Net<B>, B>::to_record(&host);
    let again = Recorder::<B>::record(&recorder, again, ()).unwrap();
    let back = burns().load_record(Recorder::<B>::load(&recorder, again, &device).unwrap());
    assert_eq!(back.to_record().len(), 4);
}
