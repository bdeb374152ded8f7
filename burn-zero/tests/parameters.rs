//! A model whose parameters do not fit the device trains from host memory: in its own process, as
//! it counts bytes.

#[path = "support/layers.rs"]
mod layers;
#[path = "support/probe.rs"]
mod probe;

use std::sync::{Arc, Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_checkpoint::{Remat, RematStats, checkpoint, checkpoint_units, is_delivered};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    HostAdamWConfig, Memory, ModelStates, OffloadConfig, OffloadedAdamW, RankReduction,
    ReduceOverRanks, Sharded, ShardingFault, SingleRank, Stage, ThreadGroup, Training, ZeroConfig,
    ZeroError, ZeroSettings, estimate, offload_parameters,
};
use layers::{Layers as Model, layers};
use probe::{Event, Probe, Upload, growth_bytes, moved, take_events, take_uploads};

type Device = Probe<Flex>;
type Plain = Sharded<Autodiff<Device>>;
type B = Sharded<Autodiff<Remat<Device>>>;

const LAYERS: usize = 24;
const WIDTH: usize = 64;
const LAYER_BYTES: usize = WIDTH * WIDTH * 4;
const PARAMETER_BYTES: usize = LAYERS * LAYER_BYTES;
const ROWS: usize = 2;
/// What autodiff saves of a layer, a matrix product and its tanh, and as much again that operations
/// compute with.
const ACTIVATION_BYTES: usize = 4 * LAYERS * ROWS * WIDTH * 4;
/// Of the device: parameters of two layers and gradients of four, of which three leave.
const LIMIT_BYTES: usize = 6 * LAYER_BYTES + ACTIVATION_BYTES;
const STEPS: usize = 3;

/// Bytes are those of the process.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    take_events();
    turn
}

fn input<B: Backend>() -> Tensor<B, 2> {
    Tensor::full([ROWS, WIDTH], 0.5, &Default::default())
}

/// As [`layers()`], but each layer is made when it is first used.
fn lazy<B: Backend>() -> Model<B> {
    let mut model = layers(LAYERS, 1, 0.2);
    for (index, layer) in model.iter_mut().enumerate() {
        let init = move |device: &B::Device, trained| {
            let weight = |at: usize| ((at * 37 + index * 11) % 101) as f32 / 101.0 - 0.5;
            let weights: Vec<_> = (0..WIDTH * WIDTH).map(weight).collect();
            let weights = Tensor::<B, 1>::from_data(weights.as_slice(), device);
            (weights.reshape([WIDTH, WIDTH]) * 0.2).set_require_grad(trained)
        };
        let (device, shape) = (Default::default(), [WIDTH, WIDTH].into());
        layer.weight = Param::uninitialized(layer.weight.id, init, device, true, shape);
    }
    model
}

/// A layer fills a bucket.
fn on_host() -> OffloadedAdamW {
    let config = OffloadConfig {
        bucket_elements: WIDTH * WIDTH,
        ..OffloadConfig::new(HostAdamWConfig::default())
    };
    config.init().expect("valid")
}

/// The trained weights.
fn train<B: AutodiffBackend>(
    mut model: Model<B>,
    mut optimizer: impl Optimizer<Model<B>, B>,
) -> Vec<u32>
where
    Model<B>: AutodiffModule<B>,
{
    for _ in 0..STEPS {
        let gradients = layers::loss(&model, input()).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
    }
    layers::weights(&model)
        .into_iter()
        .map(f32::to_bits)
        .collect()
}

/// Uploads of layers since the last call.
fn uploads() -> usize {
    let events = take_events().into_iter();
    events
        .filter(|event| *event == Event::Up(LAYER_BYTES))
        .count()
}

fn prepared<B: AutodiffBackend>(model: &Model<B>) -> OffloadedAdamW
where
    Model<B>: AutodiffModule<B>,
{
    let mut optimizer = on_host();
    optimizer.prepare(model);
    optimizer
}

#[test]
fn a_model_larger_than_the_device_is_made_and_trained() {
    let _turn = turn();
    let (plain, expected) = growth_bytes(|| {
        let model = layers::<Plain>(LAYERS, WIDTH, 0.2);
        let optimizer = prepared(&model);
        train(model, optimizer)
    });
    let (found, weights) = growth_bytes(|| {
        let model = offload_parameters::<B, _>(lazy()).expect("a backend with `Remat`");
        let optimizer = prepared(&model);
        train(model, optimizer)
    });
    println!(
        "{PARAMETER_BYTES} bytes of parameters: {plain} on the device, {found} offloaded, limit {LIMIT_BYTES}"
    );
    const { assert!(PARAMETER_BYTES > LIMIT_BYTES) };
    assert!(plain > PARAMETER_BYTES);
    assert!(found <= LIMIT_BYTES, "{found} of {LIMIT_BYTES}");
    let states = ModelStates {
        largest_parameter: (WIDTH * WIDTH) as u64,
        ..ModelStates::adam((LAYERS * WIDTH * WIDTH) as u64)
    };
    let config = ZeroConfig {
        stage: Stage::Parameters,
        offload_optimizer: Memory::Host,
        offload_param: Memory::Host,
        reduce_bucket_size: (WIDTH * WIDTH) as u64,
        ..ZeroConfig::default()
    };
    let estimated = estimate(&states, &config, 1).peak_device_bytes() as usize;
    println!("estimated {estimated}, without activations");
    assert!(found <= estimated + LAYER_BYTES + ACTIVATION_BYTES);
    assert!(weights == expected, "the bits of training without");
}

#[test]
fn a_forward_pass_holds_one_parameter_and_a_backward_pass_two() {
    let _turn = turn();
    // Another order of uses is another model here: none of them is expected after what was used
    // before.
    let new = || offload_parameters::<B, _>(lazy()).expect("a backend with `Remat`");
    let model = new();
    let loss = || layers::loss(&model, input());
    take_events();
    let (forward, tape) = growth_bytes(loss);
    assert!(forward <= LAYER_BYTES + ACTIVATION_BYTES, "{forward}");
    assert_eq!(uploads(), LAYERS, "each once");
    // The gradients stay where no optimizer takes them.
    let (backward, gradients) = growth_bytes(|| tape.backward());
    assert!(
        backward <= PARAMETER_BYTES + 2 * LAYER_BYTES + ACTIVATION_BYTES,
        "{backward}"
    );
    assert_eq!(uploads(), LAYERS - 1, "each but the first once more");
    drop(gradients);

    // A scope uses each once more; nothing of it is held by the scope.
    let model = new();
    let loss = || layers::loss(&model, input());
    take_events();
    let (scoped, tape) = growth_bytes(|| checkpoint(loss));
    assert!(scoped <= LAYER_BYTES + ACTIVATION_BYTES, "{scoped}");
    assert!(RematStats::of_thread().live_bytes <= ACTIVATION_BYTES as u64);
    drop(tape.backward());
    assert_eq!(uploads(), 3 * LAYERS - 1);

    layers::weights(&model);
    assert_eq!(moved(&take_events()), (0, 0), "a read is of the host");
    let valid = new().valid();
    take_events();
    layers::weights(&valid);
    assert_eq!(
        moved(&take_events()),
        (0, 0),
        "of the module for validation too"
    );
    let (held, _) = growth_bytes(|| layers::loss(&valid, input()));
    assert!(held <= LAYER_BYTES + ACTIVATION_BYTES, "{held}");
    assert_eq!(uploads(), LAYERS);
}

/// The device's copy is the only one that an upload makes, and what was uploaded is not what an
/// update writes.
#[test]
fn uploads_copy_nothing_on_the_host() {
    let _turn = turn();
    let mut model = offload_parameters::<B, _>(lazy()).expect("a backend with `Remat`");
    let mut optimizer = prepared(&model);
    for _ in 0..STEPS {
        let read = |layer: &burn::nn::Linear<B>| layer.weight.val().into_data();
        let versions: Vec<TensorData> = model.iter().map(read).collect();
        let before: Vec<Vec<f32>> = versions.iter().map(|data| data.to_vec().unwrap()).collect();
        let own = |upload: &Upload| {
            let mut versions = versions.iter();
            versions.any(|data| data.as_bytes().as_ptr() as usize == upload.address)
        };
        take_uploads();
        let gradients = layers::loss(&model, input()).backward();
        let uploads = take_uploads().into_iter();
        let of_layers: Vec<_> = uploads.filter(|it| it.bytes == LAYER_BYTES).collect();
        assert_eq!(of_layers.len(), 2 * LAYERS - 1);
        let copied = of_layers.iter().filter(|upload| !own(upload));
        assert_eq!(copied.map(|upload| upload.bytes).sum::<usize>(), 0);
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
        let after = versions.iter().map(|data| data.to_vec().unwrap());
        assert!(
            before == after.collect::<Vec<Vec<f32>>>(),
            "an update wrote an old version"
        );
    }
}

/// From the second step on, in the order of the step before; and the device holds one parameter
/// more.
#[test]
fn the_next_parameter_is_uploaded_while_this_one_computes() {
    let _turn = turn();
    let mut model = offload_parameters::<B, _>(lazy()).expect("a backend with `Remat`");
    let mut optimizer = prepared(&model);
    for step in 0..STEPS {
        take_events();
        let (held, loss) = growth_bytes(|| layers::loss(&model, input()));
        let ahead = usize::from(step > 0);
        assert!(
            held <= (1 + ahead) * LAYER_BYTES + ACTIVATION_BYTES,
            "{held}"
        );
        let (mut uploads, mut before_products) = (0, Vec::new());
        for event in take_events() {
            match event {
                Event::Up(LAYER_BYTES) => uploads += 1,
                Event::Computed("linear" | "float_matmul") => before_products.push(uploads),
                _ => {}
            }
        }
        // While the last one computes, the first one of backward is uploaded.
        let expected: Vec<_> = (1..=LAYERS).map(|used| used + ahead).collect();
        assert_eq!(before_products, expected, "step {step}");
        let gradients = loss.backward();
        assert_eq!(uploads + self::uploads(), 2 * LAYERS - 1, "none in vain");
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
        assert_eq!(self::uploads(), 0, "an update leaves them on the host");
    }
}

#[test]
fn an_optimizer_on_the_device_returns_parameters_to_the_host() {
    let _turn = turn();
    let settings = ZeroSettings {
        parameters: Memory::Host,
        ..ZeroSettings::default()
    };
    let group = Arc::new(SingleRank::new());
    let update = Update::new(SgdConfig::new().init()).reduce(settings, group);
    let mut update = update.expect("one rank");
    let mut model = update.prepare(lazy::<B>()).expect("a backend with `Remat`");
    for _ in 0..STEPS {
        let gradients = layers::loss(&model, input()).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        // The new values replace their gradients one by one.
        let (held, stepped) = growth_bytes(|| update.step(0.01, model, gradients));
        assert!(held <= 4 * LAYER_BYTES, "{held}");
        model = stepped.expect("a step");
        // Weights that a program sets are on the device, until the next step.
        model[0].weight = model[0].weight.clone().map(|weight| {
            Tensor::from_data(weight.into_data(), &Default::default()).require_grad()
        });
        let (held, _) = growth_bytes(|| layers::loss(&model, input()));
        assert!(held <= LAYER_BYTES + ACTIVATION_BYTES, "{held}");
    }
}

#[test]
fn ranks_hold_their_parameters_in_host_memory() {
    let _turn = turn();
    let train_rank = |memory: Memory| {
        let trained = ThreadGroup::spawn(2, Default::default(), move |group| {
            let settings = ZeroSettings {
                bucket_elements: WIDTH * WIDTH,
                parameters: memory,
                ..ZeroSettings::default()
            };
            let update = Update::new(AdamWConfig::new().init());
            let mut update = update.reduce(settings, Arc::new(group))?;
            let model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
            Ok::<_, UpdateError>(train(model, update))
        });
        let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
        trained.expect("ranks agree")
    };
    let expected = train_rank(Memory::Device);
    assert!(train_rank(Memory::Host) == expected);
}

#[test]
fn a_sharded_record_goes_from_host_memory_to_the_device_and_back() {
    let _turn = turn();
    let new = |parameters: Memory| {
        let settings = ZeroSettings {
            parameters,
            ..ZeroSettings::default()
        };
        let reduction = RankReduction::new(settings, Arc::new(SingleRank::new())).unwrap();
        let update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction);
        let mut update = update.unwrap();
        let model = update.prepare(layers::<B>(4, 8, 0.2)).unwrap();
        (
            reduction.recorder().unwrap(),
            Training {
                model,
                optimizer: update,
                scheduler: 0.01,
            },
        )
    };
    let steps = |mut training: Training<Model<B>, Update<Model<B>, B>, f64>| {
        for _ in 0..2 {
            let x = Tensor::full([ROWS, 8], 0.5, &Default::default());
            let gradients = layers::loss(&training.model, x).backward();
            let gradients = GradientsParams::from_grads(gradients, &training.model);
            let updated = training.optimizer.step(0.01, training.model, gradients);
            training.model = updated.unwrap();
        }
        training
    };
    let (_, plain) = new(Memory::Device);
    let expected = layers::weights(&steps(steps(plain)).model);
    let places = [
        (Memory::Host, Memory::Host),
        (Memory::Host, Memory::Device),
        (Memory::Device, Memory::Host),
    ];
    for (from, to) in places {
        let dir = tempfile::tempdir().unwrap();
        let (recorder, training) = new(from);
        let training = steps(training);
        let state = TrainingState::at_step(2);
        let saved = training.by_ref();
        recorder
            .save::<B, _, _, _>(dir.path(), saved, state, Keep::All)
            .unwrap();
        let (recorder, training) = new(to);
        let (training, _) = recorder
            .load::<B, _, _, _>(dir.path(), None, training)
            .unwrap();
        let weight = training.model[0].weight.val().into_primitive().tensor();
        assert_eq!(is_delivered::<B>(&weight), to == Memory::Host);
        assert!(
            layers::weights(&steps(training).model) == expected,
            "{from:?} {to:?}"
        );
    }
}

#[test]
fn a_backend_without_remat_is_refused_and_says_so() {
    let _turn = turn();
    let refused = offload_parameters::<Plain, _>(layers(1, 4, 0.2));
    let error = refused.expect_err("nothing uploads at each use");
    let ZeroError::Sharding(fault) = &error else {
        panic!("{error:?}");
    };
    assert!(matches!(fault, ShardingFault::NoRemat { .. }), "{error}");
    assert!(error.to_string().contains("Autodiff<Remat<..>>"), "{error}");
    let settings = ZeroSettings {
        parameters: Memory::Host,
        ..ZeroSettings::default()
    };
    let group = Arc::new(SingleRank::new());
    let update = Update::new(SgdConfig::new().init()).reduce(settings, group);
    let refused = update
        .expect("one rank")
        .prepare(layers::<Plain>(1, 4, 0.2));
    let error = refused.expect_err("nothing uploads at each use");
    assert_eq!(Some(&ZeroError::from(error_of())), error.cause());

    fn error_of() -> ShardingFault {
        let backend = Plain::name(&Default::default());
        ShardingFault::NoRemat { backend }
    }
}

#[test]
fn parameters_are_initialised_one_at_a_time() {
    let _turn = turn();
    let lazy: Vec<burn::nn::Linear<B>> = (0..LAYERS)
        .map(|_| burn::nn::LinearConfig::new(WIDTH, WIDTH).init(&Default::default()))
        .collect();
    let (held, model) = growth_bytes(|| offload_parameters::<B, _>(lazy));
    let model = model.expect("a backend with `Remat`");
    // A layer's initializer draws, scales and shifts.
    assert!(held <= 4 * LAYER_BYTES, "{held}");
    assert_eq!(model.num_params(), LAYERS * (WIDTH * WIDTH + WIDTH));
}

/// Scopes of the layers, in a loss of which something can be computed again.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scopes {
    ByHand,
    /// By `checkpoint_units`, before the parameters move to host memory or after it.
    Units,
    UnitsOfOffloaded,
}

/// The trained weights, and what each step has computed again. The weights are saved and loaded
/// before the last step.
fn train_in(scopes: Scopes) -> (Vec<u32>, Vec<u64>) {
    let mut model = layers::<B>(4, WIDTH, 0.2);
    if scopes == Scopes::Units {
        (model, _) = checkpoint_units(model).expect("blocks");
    }
    model = offload_parameters::<B, _>(model).expect("a `Remat`");
    if scopes == Scopes::UnitsOfOffloaded {
        (model, _) = checkpoint_units(model).expect("blocks");
    }
    let mut optimizer = prepared(&model);
    let mut replayed = Vec::new();
    for step in 0..STEPS {
        if step + 1 == STEPS {
            let record = model.clone().into_record();
            model = model.load_record(record);
        }
        let before = RematStats::of_thread().replayed_operations;
        let output = model.iter().fold(input(), |x, layer| {
            let forward = || layer.forward(x).tanh().sin();
            match scopes {
                Scopes::ByHand => checkpoint(forward),
                Scopes::Units | Scopes::UnitsOfOffloaded => forward(),
            }
        });
        // The head has no parameter, and ends no unit.
        let gradients = GradientsParams::from_grads(output.sum().backward(), &model);
        replayed.push(RematStats::of_thread().replayed_operations - before);
        model = optimizer.step(0.01, model, gradients);
    }
    let weights = layers::weights(&model).into_iter().map(f32::to_bits);
    (weights.collect(), replayed)
}

#[test]
fn parameters_in_host_memory_are_in_units() {
    let _turn = turn();
    let (expected, by_hand) = train_in(Scopes::ByHand);
    for scopes in [Scopes::Units, Scopes::UnitsOfOffloaded] {
        let (weights, replayed) = train_in(scopes);
        assert!(weights == expected, "{scopes:?}");
        assert_eq!(replayed, by_hand, "{scopes:?}");
        assert!(replayed.iter().all(|replayed| *replayed > 0));
    }
}
