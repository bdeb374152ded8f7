//! The program of Burn's guide, a convolutional network with batch normalisation in the Learner,
//! with a loss scaler, an accumulation of gradients, clipping and a schedule. One line makes ranks
//! of it.

use std::path::Path;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::data::dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::module::Module;
use burn::nn::conv::{Conv2d, Conv2dConfig};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::pool::{AdaptiveAvgPool2d, AdaptiveAvgPool2dConfig};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamConfig;
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Device, Int, Tensor, TensorData, activation::relu};
use burn::train::metric::{AccuracyMetric, LossMetric};
use burn::train::{
    ClassificationOutput, InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep,
};
use burn_accum::{AccumConfig, Accumulation, ClipNorm};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    GroupOptions, ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings,
};
use serde_json::Value;
use tempfile::tempdir;

use crate::model::values;
use crate::watch::Watch;

type B = Autocast<Sharded<Autodiff<Flex>>, F16>;

const SIDE: usize = 6;
const CLASSES: usize = 3;
const BATCH: usize = 4;
/// Six batches a rank and epoch, in windows of four.
const ITEMS: usize = 2 * 6 * BATCH;
const EPOCHS: usize = 2;

#[derive(Module, Debug)]
struct ConvNet<B: Backend> {
    first: Conv2d<B>,
    norm: BatchNorm<B>,
    second: Conv2d<B>,
    pool: AdaptiveAvgPool2d,
    linear: Linear<B>,
}

impl<B: Backend> ConvNet<B> {
    fn new() -> Self {
        let device = Default::default();
        B::seed(&device, 5);
        let model = Self {
            first: Conv2dConfig::new([1, 4], [3, 3]).init(&device),
            norm: BatchNormConfig::new(4).init(&device),
            second: Conv2dConfig::new([4, 6], [3, 3]).init(&device),
            pool: AdaptiveAvgPool2dConfig::new([1, 1]).init(),
            linear: LinearConfig::new(6, CLASSES).init(&device),
        };
        values(&model); // initialised here, not in a clone
        model
    }

    fn classify(&self, batch: Images<B>) -> ClassificationOutput<B> {
        let x = relu(self.norm.forward(self.first.forward(batch.images)));
        let x = self.pool.forward(relu(self.second.forward(x)));
        let output = self.linear.forward(x.flatten(1, 3));
        let loss = CrossEntropyLossConfig::new().init(&output.device());
        let loss = loss.forward(output.clone(), batch.targets.clone());
        ClassificationOutput::new(loss, output, batch.targets)
    }
}

impl<B: AutodiffBackend> TrainStep for ConvNet<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Images<B>) -> TrainOutput<ClassificationOutput<B>> {
        let item = self.classify(batch);
        TrainOutput::new(self, item.loss.backward(), item)
    }
}

impl<B: Backend> InferenceStep for ConvNet<B> {
    type Input = Images<B>;
    type Output = ClassificationOutput<B>;

    fn step(&self, batch: Images<B>) -> ClassificationOutput<B> {
        self.classify(batch)
    }
}

#[derive(Clone, Debug)]
struct Images<B: Backend> {
    images: Tensor<B, 4>,
    targets: Tensor<B, 1, Int>,
}

struct Draw;

impl<B: Backend> Batcher<B, usize, Images<B>> for Draw {
    fn batch(&self, items: Vec<usize>, device: &Device<B>) -> Images<B> {
        let class = |item: &usize| item % CLASSES;
        let pixels = items.iter().flat_map(|item| {
            let wave = move |pixel| (pixel as f32 * (class(item) + 1) as f32).sin();
            (0..SIDE * SIDE).map(move |pixel| wave(pixel) + (item * 7 + pixel) as f32 % 5.0 * 0.1)
        });
        let pixels = TensorData::new(pixels.collect(), [items.len(), 1, SIDE, SIDE]);
        let targets: Vec<_> = items.iter().map(|item| class(item) as i64).collect();
        Images {
            images: Tensor::from_data(pixels, device),
            targets: Tensor::from_data(&targets[..], device),
        }
    }
}

fn loader<B: Backend>(items: usize) -> Arc<dyn DataLoader<B, Images<B>>> {
    let builder = DataLoaderBuilder::new(Draw).batch_size(BATCH);
    builder.build(InMemDataset::new((0..items).collect()))
}

/// What the user's handles say at the end.
#[derive(Debug, PartialEq)]
struct Counted {
    updates: u64,
    micro_batches: u64,
    scaler_steps: u64,
    scale: f32,
    norm: Option<f32>,
}

struct Trained {
    model: Vec<Vec<f32>>,
    counted: Counted,
    shown: [Vec<String>; 2],
    /// Of the last epoch, without the optimizer's, which differs between ranks that keep theirs.
    records: [Value; 3],
}

/// A rank that is a process, or all ranks as threads.
fn program(model: ConvNet<B>, ranks: Option<ThreadGroup>) -> Trained {
    let directory = tempdir().unwrap();
    let watch = Watch::default();

    let scaler = GradScaler::new(GradScalerConfig {
        init_scale: 1024.0,
        ..GradScalerConfig::default()
    })
    .unwrap();
    let clip = ClipNorm::new(0.3).unwrap();
    let norm = clip.norm();
    let windows = Accumulation::new(AccumConfig::mean(4)).unwrap();
    let updates = windows.updates();
    let update = Update::new(AdamConfig::new().init())
        .clip(clip)
        .and_then(|update| update.reduce_in_learner(ZeroSettings::stage(Stage::Gradients)))
        .and_then(|update| update.accumulate(windows))
        .and_then(|update| update.scale(scaler.clone()));
    let update: Update<ConvNet<B>, B> = update.unwrap();
    let cosine = CosineAnnealingLrSchedulerConfig::new(0.05, 8)
        .init()
        .unwrap();
    let schedule = update.per_update(cosine);
    let strategy = match ranks {
        None => update.strategy().threads(2), // the one line more
        Some(group) => update.strategy().process(Arc::new(group)),
    };

    let training = SupervisedTraining::new(directory.path(), loader(ITEMS), loader(2 * BATCH + 1))
        .metrics((AccuracyMetric::<Flex>::new(), LossMetric::<Flex>::new()))
        .with_file_checkpointer(PrettyJsonFileRecorder::<FullPrecisionSettings>::new())
        .num_epochs(EPOCHS)
        .with_application_logger(None)
        .renderer(watch.renderer())
        .with_metric_logger(watch.logger())
        .with_training_strategy(strategy.into());
    let result = training.launch(Learner::new(model, update, schedule));
    Trained {
        model: values(&result.model),
        counted: Counted {
            updates: updates.updates(),
            micro_batches: updates.micro_batches(),
            scaler_steps: scaler.steps(),
            scale: scaler.scale(),
            norm: norm.last(),
        },
        shown: watch.lines(),
        records: ["model", "optim", "scheduler"].map(|name| record(directory.path(), name)),
    }
}

/// Null on ranks that write none.
fn record(directory: &Path, name: &str) -> Value {
    let file = directory.join(format!("checkpoint/{name}-{EPOCHS}.json"));
    let text = std::fs::read_to_string(file).unwrap_or("null".to_owned());
    serde_json::from_str(&text).unwrap()
}

/// Each thread has its own scaler, window, counters, norm and statistics: all is as with programs
/// that were made one by one.
#[test]
fn one_line_makes_ranks_of_the_whole_stack() {
    let _turn = crate::turn();
    let model = ConvNet::<B>::new();
    let before = values(&model);
    let threads = program(model.clone(), None);
    let programs = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let rank = group.rank();
        let trained = program(model.clone(), Some(group));
        let recorded = trained.records.iter().all(|record| !record.is_null());
        assert_eq!(recorded, rank == 0);
        trained
    });
    let programs = programs.unwrap();

    assert_ne!(threads.model, before);
    assert_eq!(values(&model), before); // the statistics of the user's model are those of before
    for program in &programs {
        assert_eq!(program.model, threads.model);
        assert_eq!(program.counted, threads.counted);
    }
    assert_eq!(programs[0].shown, threads.shown);
    assert_eq!(programs[0].records, threads.records);

    // Windows of four and two, each epoch.
    let Counted {
        updates,
        micro_batches,
        scaler_steps,
        scale,
        norm,
    } = threads.counted;
    assert_eq!((updates, micro_batches, scaler_steps), (4, 12, 12));
    assert_eq!(scale, 1024.0);
    assert!(norm.is_some_and(|norm| norm > 0.0), "{norm:?}");
}
