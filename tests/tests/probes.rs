//! What runs the user's step to learn something leaves the training as it was, also when it is
//! given a clone: Burn shares running statistics between clones.

use std::sync::atomic::{AtomicU64, Ordering};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder};
use burn::tensor::Tensor;
use burn::tensor::activation::gelu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::train::{TrainOutput, TrainStep};
use burn_accum::{
    AccumConfig, MicroBatchSearch, Normalization, PeakCounter, find_micro_batch, rehearse,
};
use burn_amp::{
    Autocast, F16, GradScaler, GradScalerConfig, Watch, explain_overflow, first_non_finite,
};
use burn_checkpoint::Remat;
use burn_decorator::module::independent;
use burn_flex::Flex;
use burn_update::Update;

type B = Autocast<Autodiff<Remat<Watch<Flex>>>, F16>;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    linear: Linear<B>,
    norm: BatchNorm<B>,
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        gelu(self.norm.forward(self.linear.forward(x)))
    }
}

#[derive(Module, Debug)]
struct Net<B: Backend> {
    blocks: Vec<Block<B>>,
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 3);
        let block = || Block {
            linear: LinearConfig::new(4, 4).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
        };
        Self {
            blocks: vec![block(), block()],
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let forward = |x, block: &Block<B>| block.forward(x);
        self.blocks.iter().fold(x, forward).square().mean()
    }
}

impl<B: AutodiffBackend> TrainStep for Net<B> {
    type Input = Tensor<B, 2>;
    type Output = ();

    fn step(&self, x: Tensor<B, 2>) -> TrainOutput<()> {
        TrainOutput::new(self, self.loss(x).backward(), ())
    }
}

fn batch(number: usize) -> Tensor<B, 2> {
    let values: Vec<f32> = (0..24)
        .map(|i| ((i * 7 + number * 5) % 11) as f32)
        .collect();
    Tensor::<B, 1>::from_floats(values.as_slice(), &Default::default()).reshape([6, 4])
}

struct Training {
    net: Net<B>,
    update: Update<Net<B>, B>,
    scaler: GradScaler,
}

impl Training {
    fn new() -> Self {
        let config = GradScalerConfig {
            init_scale: 16.0,
            growth_interval: 2,
            ..Default::default()
        };
        let scaler = GradScaler::new(config).unwrap();
        let update = Update::new(AdamWConfig::new().init())
            .accumulate(AccumConfig::mean(1))
            .unwrap()
            .scale(scaler.clone())
            .unwrap();
        Self {
            net: Net::new(),
            update,
            scaler,
        }
    }

    fn step(&mut self, number: usize) {
        let loss = self.net.loss(batch(number));
        let gradients = self.update.backward(&self.net, loss);
        let net = self.net.clone();
        self.net = self.update.step(1e-2, net, gradients).unwrap();
    }

    /// Everything that a training holds.
    fn state(&self) -> (Vec<u8>, Vec<u8>, f32, u64) {
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        let net = Recorder::<B>::record(&recorder, self.net.clone().into_record(), ());
        let optimizer = Recorder::<B>::record(&recorder, self.update.record(), ());
        let (net, optimizer) = (net.unwrap(), optimizer.unwrap());
        // The state of an optimizer is a hash map: its bytes in any order.
        let mut sorted = optimizer;
        sorted.sort_unstable();
        (net, sorted, self.scaler.scale(), self.scaler.steps())
    }
}

/// Trains with a probe between the steps, before the first one too, and without.
fn changes_nothing(name: &str, probe: impl Fn(&Training)) {
    let (mut with, mut without) = (Training::new(), Training::new());
    // Ids are random, and part of a record.
    without.net = independent::<B, _>(&with.net);
    for number in 0..4 {
        probe(&with);
        with.step(number);
        without.step(number);
        assert_eq!(with.state(), without.state(), "{name}, step {number}");
    }
}

#[test]
fn the_first_non_finite_operation_is_found_without_a_trace() {
    changes_nothing("first_non_finite", |training| {
        let clone = training.net.clone();
        let found = first_non_finite(&clone, |net| net.loss(batch(9) * 1e4).backward());
        assert!(found.is_some());
    });
}

#[test]
fn a_micro_batch_is_found_without_a_trace() {
    changes_nothing("find_micro_batch", |training| {
        let search = MicroBatchSearch::new(8, 1 << 20).with_normalization(Normalization::Tokens);
        let used = AtomicU64::new(0);
        let mut counter = PeakCounter::new(
            || used.store(0, Ordering::Relaxed),
            || used.load(Ordering::Relaxed),
        );
        find_micro_batch::<B, _>(&search, &Default::default(), &mut counter, |size| {
            used.store(size as u64, Ordering::Relaxed);
            rehearse(training.net.clone(), training.update.clone(), || batch(9));
        })
        .unwrap();
    });
}

#[test]
fn an_overflow_is_explained_without_a_trace() {
    type Input = (Tensor<B, 2>, f64);
    fn plain(net: &Net<B>, (x, factor): Input) -> TrainOutput<()> {
        TrainOutput::new(net, (net.loss(x) * factor).backward(), ())
    }
    let train = |training: &mut Training, step: fn(&Net<B>, Input) -> TrainOutput<()>| {
        // The gradients of a loss times 1e30 overflow; its running statistics do not.
        for (number, factor) in [1.0, 1e30, 1.0].into_iter().enumerate() {
            let output = step(&training.net, (batch(number), factor));
            let net = training.net.clone();
            training.net = training.update.step(1e-2, net, output.grads).unwrap();
        }
        training.state()
    };
    let mut with = Training::new();
    let start = independent::<B, _>(&with.net);
    let found = train(&mut with, |net, input| explain_overflow(net, input, plain));
    let mut without = Training::new();
    without.net = start;
    let expected = train(&mut without, plain);
    assert!(with.scaler.first_non_finite().is_some());
    assert_eq!(found, expected);
}
