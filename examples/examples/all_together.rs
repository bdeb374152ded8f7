//! burn-amp, burn-accum, burn-checkpoint and burn-zero in one Learner: a classifier of digits that
//! the program draws, in f32 and in bf16 with everything on.
//!
//! `cargo run --release --example all_together`

use std::error::Error;
use std::f32::consts::TAU;
use std::ops::Range;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::tensor::activation::relu;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device, ElementConversion, Int, Tensor, TensorData};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::Autocast;
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{ReduceOverRanks, Sharded, Stage, ZeroSettings};

/// On a GPU `Cuda` in place of `Flex`.
type Plain = Autodiff<Flex>;
type Everything = Autocast<Sharded<Autodiff<Remat<Flex>>>>;

const SIDE: usize = 12;
const TRAINING: Range<usize> = 0..2048;
const VALIDATION: Range<usize> = 2048..2304;
const BATCH: usize = 32;
const EPOCHS: usize = 6;

#[derive(Module, Debug)]
struct Classifier<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    output: Linear<B>,
}

impl<B: Backend> Classifier<B> {
    fn new(device: &B::Device) -> Self {
        B::seed(device, 7);
        let stride = Conv2dConfig::new([16, 32], [3, 3]).with_stride([2, 2]);
        Self {
            first: Conv2dConfig::new([1, 16], [3, 3]).init(device),
            norm: BatchNormConfig::new(16).init(device),
            second: stride.init(device),
            output: LinearConfig::new(32 * 16, 10).init(device),
        }
    }

    fn classify(&self, batch: Digits<B>) -> ClassificationOutput<B> {
        // The activations of the convolutions are recomputed in backward.
        let x = checkpoint(|| {
            let x = relu(self.norm.forward(self.first.forward(batch.images)));
            relu(self.second.forward(x)).flatten(1, 3)
        });
        let output = self.output.forward(x);
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for Classifier<B> {
    type Input = Digits<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Digits<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for Classifier<B> {
    type Input = Digits<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Digits<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

#[derive(Clone, Debug)]
struct Digits<B: Backend> {
    images: Tensor<B, 4>,
    targets: Tensor<B, 1, Int>,
}

/// Draws item `i`: the digit `i % 10` in seven segments, with random position, brightness and
/// noise.
struct Draw;

/// Which of top, middle, bottom, left above, left below, right above, right below are lit.
const SEGMENTS: [u8; 10] = [
    0b1011111, 0b0000011, 0b1110110, 0b1110011, 0b0101011, 0b1111001, 0b1111101, 0b1000011,
    0b1111111, 0b1111011,
];

fn draw(item: usize) -> Vec<f32> {
    // Random numbers from 0 to 1, a function of the item and an index.
    let noise = |index: usize| {
        let wave = ((item * 7919 + index * 104_729) as f32 * 0.618_034).sin() * 43_758.547;
        wave - wave.floor()
    };
    let shift = |index| (noise(index) * 6.0) as usize;
    let (left, top) = (shift(1), shift(2).min(4));
    let lit = |row: usize, column: usize| {
        let (Some(row), Some(column)) = (row.checked_sub(top), column.checked_sub(left)) else {
            return false;
        };
        let on = |segment: usize| SEGMENTS[item % 10] >> (6 - segment) & 1 == 1;
        let across = column < 5 && (row % 3 == 0 && row < 7 && on(row / 3));
        let down =
            row < 7 && ((column == 0 && on(3 + row / 4)) || (column == 4 && on(5 + row / 4)));
        across || down
    };
    let pixel = |index| {
        let light = f32::from(lit(index / SIDE, index % SIDE)) * (0.6 + 0.4 * noise(3));
        let radius = (-2.0 * noise(4 + index).max(1e-6).ln()).sqrt();
        light + 0.1 * radius * (TAU * noise(1000 + index)).cos()
    };
    (0..SIDE * SIDE).map(pixel).collect()
}

impl<B: Backend> Batcher<B, usize, Digits<B>> for Draw {
    fn batch(&self, items: Vec<usize>, device: &Device<B>) -> Digits<B> {
        let pixels = items.iter().flat_map(|&item| draw(item)).collect();
        let targets: Vec<_> = items.iter().map(|item| (item % 10) as i64).collect();
        let shape = [items.len(), 1, SIDE, SIDE];
        Digits {
            images: Tensor::from_data(TensorData::new::<f32, _>(pixels, shape), device),
            targets: Tensor::from_data(&targets[..], device),
        }
    }
}

fn loader<B: Backend>(items: Range<usize>, batch: usize) -> Arc<dyn DataLoader<B, Digits<B>>> {
    let builder = DataLoaderBuilder::new(Draw).batch_size(batch).shuffle(1);
    builder.build(InMemDataset::new(items.collect()))
}

/// The percentage of the validation digits that the model classifies correctly.
fn accuracy<B: Backend>(model: &Classifier<B>) -> f64 {
    let digits = model.classify(Draw.batch(VALIDATION.collect(), &Default::default()));
    let named = digits.output.argmax(1).squeeze_dim(1);
    let right = named.equal(digits.targets).float().mean();
    100.0 * right.into_scalar().elem::<f64>()
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = Default::default();
    let cosine = CosineAnnealingLrSchedulerConfig::new(4e-3, EPOCHS * TRAINING.len() / BATCH);

    // As in Burn's guide.
    let training = SupervisedTraining::new(
        "artifacts/plain",
        loader(TRAINING, BATCH),
        loader(VALIDATION, BATCH),
    );
    let model = Classifier::<Plain>::new(&device);
    let learner = Learner::new(model, AdamWConfig::new().init(), cosine.init()?);
    let training = training
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .num_epochs(EPOCHS);
    let plain = accuracy(&training.launch(learner).model);

    // In bf16, recomputed, sharded, clipped, in four micro-batches of four on each of two ranks.
    let update = Update::new(AdamWConfig::new().init())
        .clip_norm(5.0)?
        .reduce_in_learner(ZeroSettings::stage(Stage::Gradients))?
        .accumulate(AccumConfig::mean(4))?;
    let (strategy, schedule) = (update.strategy(), update.per_update(cosine.init()?));
    let training = SupervisedTraining::new(
        "artifacts/everything",
        loader(TRAINING, BATCH / 8),
        loader(VALIDATION, BATCH),
    );
    let model = Classifier::<Everything>::new(&device);
    let learner = Learner::new(model, update, schedule);
    let training = training
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_training_strategy(strategy.threads(2).into())
        .num_epochs(EPOCHS);
    let everything = accuracy(&training.launch(learner).model);

    println!("digits named rightly: {plain:.1} % in f32, {everything:.1} % with everything on");
    assert!(plain > 97.0 && everything > 97.0);
    Ok(())
}
