//! Models with running statistics, which clones share and each rank makes of its own batches.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use burn::data::dataloader::{DataLoader, DataLoaderBuilder};
use burn::data::dataset::InMemDataset;
use burn::lr_scheduler::constant::ConstantLr;
use burn::module::{AutodiffModule, Module};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::AdamWConfig;
use burn::record::{FullPrecisionSettings, PrettyJsonFileRecorder};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData, activation::tanh};
use burn::train::checkpoint::KeepLastNCheckpoints;
use burn::train::metric::LossMetric;
use burn::train::{
    InferenceStep, Learner, LearningComponentsMarker, SupervisedTraining, TrainOutput, TrainStep,
    TrainingStrategy,
};
use burn_flex::Flex;
use burn_update::{Update, UpdateStrategy};
use burn_zero::{GroupOptions, ReduceOverRanks, Stage, ThreadGroup, ZeroSettings};
use tempfile::{TempDir, tempdir};

use crate::Z;
use crate::learner::MICRO_BATCH;
use crate::loader::AsTheyAre;
use crate::model::{Output, Row, rows, values};
use crate::watch::Watch;

/// Short: a rank that waited for a lock would be found.
const DEADLINE: Duration = Duration::from_secs(5);
const RANKS: usize = 2;

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    first: Linear<B>,
    norm: BatchNorm<B>,
    last: Linear<B>,
}

impl<B: Backend> Normed<B> {
    fn new() -> Self {
        let device = Default::default();
        let linear = |from, to| LinearConfig::new(from, to).with_bias(false).init(&device);
        B::seed(&device, 3);
        let model = Self {
            first: linear(5, 7),
            norm: BatchNormConfig::new(7).init(&device),
            last: linear(7, 1),
        };
        values(&model);
        model
    }

    fn loss(&self, rows: &[Row]) -> Tensor<B, 1> {
        let value = |row: &Row, column| ((row.index * 5 + column) as f32 * 0.37).sin();
        let waves: Vec<f32> = rows
            .iter()
            .flat_map(|row| (0..5).map(move |column| value(row, column)))
            .collect();
        let waves = TensorData::new(waves, [rows.len(), 5]);
        let x = Tensor::<B, 2>::from_data(waves, &Default::default());
        let hidden = tanh(self.norm.forward(self.first.forward(x.clone())));
        (self.last.forward(hidden) - x.sum_dim(1)).square().mean()
    }

    fn output(&self, rows: &[Row]) -> (Tensor<B, 1>, Output) {
        let loss = self.loss(rows);
        let value = loss.clone().into_data().iter::<f32>().sum();
        let output = Output {
            loss: value,
            slow: false,
        };
        (loss, output)
    }
}

impl<B: AutodiffBackend> TrainStep for Normed<B> {
    type Input = Vec<Row>;
    type Output = Output;

    fn step(&self, rows: Vec<Row>) -> TrainOutput<Output> {
        let (loss, output) = self.output(&rows);
        TrainOutput::new(self, loss.backward(), output)
    }
}

impl<B: Backend> InferenceStep for Normed<B> {
    type Input = Vec<Row>;
    type Output = Output;

    fn step(&self, rows: Vec<Row>) -> Output {
        self.output(&rows).1
    }
}

type Components = LearningComponentsMarker<Z, ConstantLr, Normed<Z>, Update<Normed<Z>, Z>>;
type Inner = <Z as AutodiffBackend>::InnerBackend;

fn adamw() -> Update<Normed<Z>, Z> {
    let update = Update::new(AdamWConfig::new().init());
    let settings = ZeroSettings::stage(Stage::Gradients);
    update.reduce_in_learner(settings).unwrap()
}

struct Trained {
    model: Normed<Inner>,
    watch: Watch,
    directory: TempDir,
}

/// Two batches to validate on, one a rank.
fn valid() -> Vec<Row> {
    rows(1000, 1000 + RANKS * MICRO_BATCH)
}

fn launch(
    model: Normed<Z>,
    ranks: impl FnOnce(UpdateStrategy<Components>) -> UpdateStrategy<Components>,
    epochs: usize,
    resume: Option<(usize, &Path)>,
) -> Trained {
    fn loader<B: Backend>(rows: Vec<Row>) -> Arc<dyn DataLoader<B, Vec<Row>>> {
        let loader = DataLoaderBuilder::new(AsTheyAre).batch_size(MICRO_BATCH);
        loader.build(InMemDataset::new(rows))
    }
    let (watch, directory) = (Watch::default(), tempdir().unwrap());
    let update = adamw();
    let strategy: TrainingStrategy<Components> = ranks(update.strategy()).into();
    let learner = Learner::new(model, update, ConstantLr::new(0.05));
    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let mut training = SupervisedTraining::new(
        directory.path(),
        loader::<Z>(rows(0, 16)),
        loader::<Inner>(valid()),
    )
    .num_epochs(epochs)
    .with_application_logger(None)
    .renderer(watch.renderer())
    .with_file_checkpointer(recorder)
    .with_checkpointing_strategy(KeepLastNCheckpoints::new(100))
    .metrics((LossMetric::<Flex>::new(),))
    .with_metric_logger(watch.logger())
    .with_training_strategy(strategy);
    if let Some((epoch, from)) = resume {
        crate::learner::copy_records(from, directory.path());
        training = training.checkpoint(epoch);
    }
    Trained {
        model: training.launch(learner).model,
        watch,
        directory,
    }
}

fn options() -> GroupOptions {
    GroupOptions::with_deadline(DEADLINE)
}

fn threads(strategy: UpdateStrategy<Components>) -> UpdateStrategy<Components> {
    strategy.threads(RANKS).with_options(options())
}

/// As threads, each with a copy of the model.
fn on_threads(epochs: usize, resume: Option<(usize, &Path)>) -> Trained {
    launch(Normed::new(), threads, epochs, resume)
}

/// As programs.
fn programs(epochs: usize) -> Vec<Trained> {
    let making = Mutex::new(());
    ThreadGroup::spawn(RANKS, options(), |group| {
        let model = {
            let _turn = making.lock().unwrap();
            Normed::<Z>::new()
        };
        launch(
            model,
            |strategy| strategy.process(Arc::new(group)),
            epochs,
            None,
        )
    })
    .unwrap()
}

#[test]
fn what_is_validated_is_the_first_ranks_model() {
    let _turn = crate::turn();
    let programs = programs(1);
    let [first, second] = &programs[..] else {
        unreachable!("there are two");
    };
    assert_eq!(values(&first.model), values(&second.model));
    let logged = first.watch.logged("valid 1 ");
    for batch in valid().chunks(MICRO_BATCH) {
        let loss = f64::from(first.model.output(batch).1.loss);
        let expected = format!("{loss:?}");
        let is_there = logged.iter().any(|line| line.contains(&expected));
        assert!(is_there, "{expected} is not in {logged:#?}");
    }
}

#[test]
fn threads_are_programs_and_a_resumed_training_is_whole() {
    let _turn = crate::turn();
    let whole = on_threads(3, None);
    let programs = programs(3);
    assert_eq!(values(&programs[1].model), values(&whole.model));
    assert_eq!(programs[0].watch.lines(), whole.watch.lines());

    let resumed = on_threads(3, Some((1, whole.directory.path())));
    assert_eq!(values(&resumed.model), values(&whole.model));
    // Burn counts the logged epochs of a resumed training anew.
    let validated = |trained: &Trained| {
        let lines = trained.watch.logged("valid ").into_iter();
        let lines = lines.filter_map(|line| Some(line.split_once(' ')?.1.to_owned()));
        lines.collect::<Vec<_>>()
    };
    let (resumed, whole) = (validated(&resumed), validated(&whole));
    assert_eq!(whole.len(), 3 * RANKS);
    assert_eq!(resumed, whole[RANKS..]);
}

/// A rank trains its own statistics: neither those of the model that the Learner was made of, nor,
/// as programs, those of a model that all have.
#[test]
fn clones_are_made_independent() {
    let _turn = crate::turn();
    let expected = on_threads(1, None);
    let model = Normed::<Z>::new();
    let untouched = values(&model.valid());
    let threads = launch(model.clone(), threads, 1, None);
    assert_eq!(values(&model.valid()), untouched);
    let programs = ThreadGroup::spawn(RANKS, options(), |group| {
        let process = |strategy: UpdateStrategy<_>| strategy.process(Arc::new(group));
        launch(model.clone(), process, 1, None)
    });
    for trained in [&threads, &programs.unwrap()[0]] {
        assert_eq!(values(&trained.model), values(&expected.model));
        assert_eq!(trained.watch.lines(), expected.watch.lines());
    }
    assert_eq!(values(&model.valid()), untouched);
}
