//! The training loop of Burn's `Learner`: one rank or many, by epochs or by updates.
//!
//! | file | idea |
//! |---|---|
//! | `launch` | starts the ranks: this thread, several, or one process of a group |
//! | `rank` | one rank's training: epochs or intervals, with their decisions |
//! | `epoch` | the steps, and the validation |
//! | `driver` | what the loop asks of the optimizer inside the Learner |
//! | `data`, `sampler`, `loader` | which rank reads which items, in which order |
//! | `items`, `summed` | outputs of models on their way to rank 0, which computes the metrics |

mod data;
mod driver;
mod epoch;
mod items;
mod launch;
mod loader;
mod rank;
mod sampler;
mod silent;
mod summed;

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, TrainLoader, TrainStep, TrainingBackend, TrainingComponents,
    TrainingModel, TrainingStrategy, ValidLoader,
};
use burn_ranks::{GroupOptions, ProcessGroup};

pub use driver::{Driver, EpochTail, Position, RankDriver, WriteRecord};
pub use items::RankItem;
pub use loader::{EpochItems, RankLoader, SampledLoader};
pub use sampler::{DistributedSampler, EpochOfRank, Tail};
pub use silent::SilentRenderer;
pub use summed::{BatchSums, SummedOutput};

use crate::error::raise;
use driver::Counting;
use items::Format;
use launch::Fitted;

type TrainInput<LC> = <TrainingModel<LC> as TrainStep>::Input;
type TrainItem<LC> = <TrainingModel<LC> as TrainStep>::Output;
type ValidItem<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;
type TrainData<LC> = Arc<dyn RankLoader<TrainingBackend<LC>, TrainInput<LC>>>;

/// Burn's training in the Learner, with one rank or several: threads of this program, or one
/// process each. burn-accum's `AccumulatingStrategy` and burn-zero's `ZeroStrategy` are this loop
/// for their optimizers.
///
/// With one rank it is Burn's training on one device, bit for bit: model, metrics, records,
/// validation, events, resuming, early stopping, interrupter. There are two differences. A window
/// of micro-batches that is open at the end of an epoch is applied with its true weights, before
/// the model is validated and recorded. Early stopping and the choice of records wait for the
/// metrics of an epoch's last items; Burn may decide before.
///
/// # Data
///
/// The batch of the loaders is per rank. With a [`SampledLoader`]
/// ([`with_train_loader`](Self::with_train_loader)) each epoch is a new order of all data, the same
/// at any number of ranks, of which each rank reads its part, and a resumed training goes on with
/// it: PyTorch's `DistributedSampler`. Any other loader is cut by `DataLoader::slice`: each rank
/// trains on one of equally long contiguous parts in all epochs, and a loader that shuffles does so
/// within each part. Where the data does not divide by the ranks, some items, fewer than there are
/// ranks, are trained on twice an epoch. An epoch ends when the first rank has no more batches. The
/// scheduler is stepped once a step, of which an epoch has `1 / N` as many as with one rank.
///
/// Each rank validates every `N`th of the batches that one rank alone would; their size is that of
/// the first batch, which a loader with several workers may cut short. Rank 0 computes all metrics,
/// of the items of all ranks in the same order, so that they are those of one rank to the last bit.
/// Threads hand items over as they are, and processes as bytes: there the outputs of the model must
/// be [`RankItem`]s. Burn's are sent whole, with their logits; a [`SummedOutput`] has 16 bytes.
///
/// # Decisions
///
/// Rank 0 renders, logs, computes metrics, writes records and decides on early stopping. One
/// interrupted rank interrupts all, after the same step, with its reason. The learning rates of all
/// ranks are compared in each step.
///
/// # Panics
///
/// Before the first step with the message of an [`UpdateError`](crate::UpdateError), or of what the
/// optimizer's crate says. A rank that panics ends all ranks, with its message: at once if they
/// wait for it. A thread cannot be ended from outside: if one hangs, the process ends with the
/// message on stderr; see [`GroupOptions::deadline`].
pub struct UpdateStrategy<LC: LearningComponentsTypes> {
    driver: Arc<dyn Driver<LC>>,
    ranks: Ranks,
    devices: Option<Vec<Device<TrainingBackend<LC>>>>,
    train_loader: Option<TrainData<LC>>,
    train_metrics: TrainMetrics,
    train_format: Option<Format<TrainItem<LC>>>,
    valid_format: Option<Format<ValidItem<LC>>>,
    tail: EpochTail,
    counting: Counting,
}

/// Of whose batches the metrics of training are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TrainMetrics {
    AllRanks,
    Rank0,
}

enum Ranks {
    /// The number of threads.
    Threads(usize, GroupOptions),
    Process(Arc<dyn ProcessGroup>),
}

impl<LC: LearningComponentsTypes> UpdateStrategy<LC> {
    /// One rank, with an optimizer that is asked through `driver`. It trains where the model is (its
    /// first parameter), as Burn's Learner does by default.
    pub fn driven(driver: impl Driver<LC> + 'static) -> Self {
        Self {
            driver: Arc::new(driver),
            ranks: Ranks::Threads(1, GroupOptions::default()),
            devices: None,
            train_loader: None,
            train_metrics: TrainMetrics::AllRanks,
            train_format: None,
            valid_format: None,
            tail: EpochTail::default(),
            counting: Counting::default(),
        }
    }

    /// `world_size` ranks, each a thread. All compute on the model's device unless set by
    /// [`with_devices`](Self::with_devices).
    #[must_use]
    pub fn threads(mut self, world_size: usize) -> Self {
        self.ranks = Ranks::Threads(world_size, GroupOptions::default());
        self
    }

    /// One rank of the group, which is this process; the group's others are processes that run the
    /// same program.
    ///
    /// It computes on the device of the Learner's model unless [`with_devices`](Self::with_devices)
    /// sets another. Where a machine has several GPUs, the default device is the first of them in
    /// every process: [`local_rank`](burn_ranks::local_rank()) numbers the processes.
    #[must_use]
    pub fn process(mut self, group: Arc<dyn ProcessGroup>) -> Self
    where
        TrainItem<LC>: RankItem,
        ValidItem<LC>: RankItem,
    {
        self.ranks = Ranks::Process(group);
        self.train_format = Some((RankItem::into_bytes, RankItem::from_bytes));
        self.valid_format = Some((RankItem::into_bytes, RankItem::from_bytes));
        self
    }

    /// The device of each rank, in their order; for a process only its own.
    #[must_use]
    pub fn with_devices(mut self, devices: Vec<Device<TrainingBackend<LC>>>) -> Self {
        self.devices = Some(devices);
        self
    }

    /// The training data, of which each rank reads the part that the loader gives it, in an order
    /// of its own for each epoch: a [`SampledLoader`], or one of your own. It takes the place of
    /// the loader that `SupervisedTraining::new` was given; give it the same one.
    #[must_use]
    pub fn with_train_loader<L>(mut self, loader: Arc<L>) -> Self
    where
        L: RankLoader<TrainingBackend<LC>, TrainInput<LC>> + 'static,
    {
        self.train_loader = Some(loader);
        self
    }

    /// Computes the metrics of training from rank 0's batches alone, so that no output is sent in
    /// training: for processes whose model has outputs with logits that cannot be
    /// [`SummedOutput`]s. Those of validation are of all ranks in any case.
    #[must_use]
    pub fn with_train_metrics_of_rank_0(mut self) -> Self {
        self.train_metrics = TrainMetrics::Rank0;
        self
    }

    /// Settings of the group of threads, such as its deadline. A process's group has its own.
    #[must_use]
    pub fn with_options(mut self, of_group: GroupOptions) -> Self {
        if let Ranks::Threads(_, options) = &mut self.ranks {
            *options = of_group;
        }
        self
    }

    /// Chooses what happens to a window that is not complete when an epoch ends. Default
    /// [`EpochTail::Apply`].
    #[must_use]
    pub fn with_tail(mut self, tail: EpochTail) -> Self {
        self.tail = tail;
        self
    }
}

impl<LC: LearningComponentsTypes + 'static> SupervisedLearningStrategy<LC> for UpdateStrategy<LC> {
    /// Burn's own training on rank 0; on other ranks the same without events.
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        // A learner has the model by value.
        let learner = Box::new(learner);
        match &self.ranks {
            Ranks::Process(group) if group.rank() != 0 => {
                self.train_in_silence(learner, train, valid, components)
            }
            _ => WithEvents(self).train(*learner, train, valid, components),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        epoch: usize,
    ) -> Fitted<LC> {
        raise(self.try_fit(components, learner, train, valid, epoch))
    }
}

impl<LC: LearningComponentsTypes + 'static> UpdateStrategy<LC> {
    /// The training of a process that is not rank 0.
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    fn train_in_silence(
        &self,
        mut learner: Box<Learner<LC>>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        let mut epoch = 1;
        if let Some(saved) = components.checkpoint {
            if let Some(checkpointer) = &components.checkpointer {
                *learner = checkpointer.load_checkpoint(*learner, &Default::default(), saved);
            }
            epoch = saved + 1;
        }
        let (model, processor) = self.fit(components, *learner, train, valid, epoch);
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
        }
    }
}

/// The training that Burn runs around the `fit` of every strategy, with its events.
struct WithEvents<'a, LC: LearningComponentsTypes>(&'a UpdateStrategy<LC>);

impl<LC: LearningComponentsTypes + 'static> SupervisedLearningStrategy<LC> for WithEvents<'_, LC> {
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        epoch: usize,
    ) -> Fitted<LC> {
        self.0.fit(components, learner, train, valid, epoch)
    }
}

/// For `SupervisedTraining::with_training_strategy`.
impl<LC: LearningComponentsTypes + 'static> From<UpdateStrategy<LC>> for TrainingStrategy<LC> {
    fn from(strategy: UpdateStrategy<LC>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}
