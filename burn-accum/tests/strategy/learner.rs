//! A Learner that is watched, in a directory of its own.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use burn::{
    backend::Autodiff,
    data::{
        dataloader::{DataLoader, DataLoaderBuilder, batcher::Batcher},
        dataset::InMemDataset,
    },
    lr_scheduler::LrScheduler,
    optim::Optimizer,
    record::{FullPrecisionSettings, PrettyJsonFileRecorder},
    tensor::{
        Device,
        backend::{AutodiffBackend, Backend},
    },
    train::{
        EarlyStoppingStrategy, Interrupter, Learner, LearningComponentsMarker,
        MetricEarlyStoppingStrategy, StoppingCondition, SupervisedTraining, TrainingStrategy,
        checkpoint::KeepLastNCheckpoints,
        metric::{
            LearningRateMetric, LossMetric,
            store::{Aggregate, Direction, EventStoreClient, Split},
        },
        renderer::MetricsRenderer,
    },
};
use burn_flex::Flex;
use serde_json::Value;

use crate::{
    model::{Model, Row},
    watch::{MetadataMetric, Watch},
};

pub type B = Autodiff<Flex>;

/// What is trained with.
pub type Components<B, O, S> = LearningComponentsMarker<B, S, Model<B>, O>;

/// Rows a micro-batch.
pub const MICRO_BATCH: usize = 4;

/// What a training is like.
pub struct Setup {
    pub train: Vec<Row>,
    pub valid: Vec<Row>,
    pub shuffle: Option<u64>,
    pub epochs: usize,
    /// The epoch to resume from, and where its record is.
    pub resume: Option<(usize, PathBuf)>,
    pub stop: Option<Stop>,
    /// Index of the row, in training or validation, that interrupts.
    pub interrupt_at: Option<usize>,
    pub burns_accumulation: Option<usize>,
    /// Burn's files in place of the watched logger, and a summary of them.
    pub summary: bool,
}

/// When to stop early.
#[derive(Clone, Copy)]
pub enum Stop {
    After(usize),
    NoImprovementSince(usize),
}

#[derive(Clone)]
struct StopAfter(usize);

impl EarlyStoppingStrategy for StopAfter {
    fn should_stop(&mut self, epoch: usize, _: &EventStoreClient) -> bool {
        epoch >= self.0
    }
}

impl Setup {
    pub fn new(train: Vec<Row>, epochs: usize) -> Self {
        Self {
            train,
            valid: crate::model::rows(1000, 1006),
            shuffle: None,
            epochs,
            resume: None,
            stop: None,
            interrupt_at: None,
            burns_accumulation: None,
            summary: false,
        }
    }
}

/// What a training has come to.
pub struct Outcome<B: AutodiffBackend> {
    pub model: Model<B::InnerBackend>,
    pub watch: Watch,
    pub interrupter: Interrupter,
    pub directory: Directory,
}

/// Removed with everything in it.
pub struct Directory(PathBuf);

impl Directory {
    fn new() -> Self {
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("burn-accum-strategy-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }

    pub fn path(&self) -> &Path {
        &self.0
    }

    fn record(&self, name: &str, epoch: usize) -> PathBuf {
        self.0.join(format!("checkpoint/{name}-{epoch}.json"))
    }

    pub fn is_recorded(&self, epoch: usize) -> bool {
        self.record("optim", epoch).exists()
    }

    /// The bytes of the model's and the scheduler's record, and the optimizer's, whose parameters
    /// Burn writes in the random order of a hash map. The place in the data, which Burn's own loop
    /// does not write, is left out of it.
    pub fn records(&self, epoch: usize) -> (String, String, Value) {
        let read = |name| std::fs::read_to_string(self.record(name, epoch)).unwrap();
        let mut optimizer: Value = serde_json::from_str(&read("optim")).unwrap();
        let update = optimizer.pointer_mut("/item/parts/update/values");
        if let Some(values) = update.and_then(Value::as_object_mut) {
            values.remove("epoch");
            values.remove("batches");
        }
        (read("model"), read("scheduler"), optimizer)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        std::fs::remove_dir_all(&self.0).ok();
    }
}

/// Trains with the strategy, or as Burn does by default.
pub fn train<B, O, S>(
    model: Model<B>,
    optimizer: O,
    scheduler: S,
    setup: Setup,
    strategy: Option<TrainingStrategy<Components<B, O, S>>>,
) -> Outcome<B>
where
    B: AutodiffBackend,
    O: Optimizer<Model<B>, B> + 'static,
    S: LrScheduler + 'static,
{
    let watch = Watch::default();
    let renderer = watch.renderer();
    let learner = Learner::new(model, optimizer, scheduler);
    train_shown(learner, setup, strategy, watch, renderer)
}

/// Trains in front of `renderer`.
pub fn train_shown<B, O, S>(
    learner: Learner<Components<B, O, S>>,
    setup: Setup,
    strategy: Option<TrainingStrategy<Components<B, O, S>>>,
    watch: Watch,
    renderer: impl MetricsRenderer + 'static,
) -> Outcome<B>
where
    B: AutodiffBackend,
    O: Optimizer<Model<B>, B> + 'static,
    S: LrScheduler + 'static,
{
    let directory = Directory::new();
    let interrupter = Interrupter::new();
    if let Some((_, from)) = &setup.resume {
        copy_records(from, directory.path());
    }
    let train = loader::<B>(setup.train, setup.shuffle, setup.interrupt_at, &interrupter);
    let valid = loader(setup.valid, None, setup.interrupt_at, &interrupter);

    let recorder = PrettyJsonFileRecorder::<FullPrecisionSettings>::new();
    let mut training = SupervisedTraining::new(directory.path(), train, valid)
        .num_epochs(setup.epochs)
        .with_application_logger(None)
        .with_interrupter(interrupter.clone())
        .renderer(renderer)
        .with_file_checkpointer(recorder)
        .with_checkpointing_strategy(KeepLastNCheckpoints::new(100))
        .metrics((LossMetric::<Flex>::new(),))
        .metrics_text((MetadataMetric,))
        .metric_train_numeric(LearningRateMetric::new());
    training = match setup.summary {
        true => training.summary(),
        false => training.with_metric_logger(watch.logger()),
    };
    if let Some((epoch, _)) = setup.resume {
        training = training.checkpoint(epoch);
    }
    match setup.stop {
        None => {}
        Some(Stop::After(epoch)) => training = training.early_stopping(StopAfter(epoch)),
        Some(Stop::NoImprovementSince(n_epochs)) => {
            training = training.early_stopping(MetricEarlyStoppingStrategy::new(
                &LossMetric::<Flex>::new(),
                Aggregate::Mean,
                Direction::Lowest,
                Split::Valid,
                StoppingCondition::NoImprovementSince { n_epochs },
            ));
        }
    }
    if let Some(accumulation) = setup.burns_accumulation {
        training = training.grads_accumulation(accumulation);
    }
    if let Some(strategy) = strategy {
        training = training.with_training_strategy(strategy);
    }
    Outcome {
        model: training.launch(learner).model,
        watch,
        interrupter,
        directory,
    }
}

pub fn copy_records(from: &Path, to: &Path) {
    let to = to.join("checkpoint");
    std::fs::create_dir_all(&to).unwrap();
    for file in std::fs::read_dir(from.join("checkpoint")).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), to.join(file.file_name())).unwrap();
    }
}

fn loader<B: Backend>(
    rows: Vec<Row>,
    shuffle: Option<u64>,
    interrupt_at: Option<usize>,
    interrupter: &Interrupter,
) -> Arc<dyn DataLoader<B, Vec<Row>>> {
    let builder = DataLoaderBuilder::new(Rows {
        interrupt_at,
        interrupter: interrupter.clone(),
    });
    let builder = builder.batch_size(MICRO_BATCH);
    match shuffle {
        Some(seed) => builder.shuffle(seed).build(InMemDataset::new(rows)),
        None => builder.build(InMemDataset::new(rows)),
    }
}

struct Rows {
    interrupt_at: Option<usize>,
    interrupter: Interrupter,
}

impl<B: Backend> Batcher<B, Row, Vec<Row>> for Rows {
    fn batch(&self, rows: Vec<Row>, _: &Device<B>) -> Vec<Row> {
        if rows.iter().any(|row| Some(row.index) == self.interrupt_at) {
            self.interrupter.stop(Some("there it is"));
        }
        rows
    }
}

/// A turn with the random generator, of which the backend has one for the whole process.
pub fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}
