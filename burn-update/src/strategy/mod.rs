//! The training loop of Burn's `Learner`: one rank or many, by epochs or by updates.
//!
//! | file | idea |
//! |---|---|
//! | `launch` | starts the ranks: this thread, several, or one process of a group |
//! | `rank` | one rank's training: epochs or intervals, with their decisions |
//! | `epoch` | the steps, and the validation |
//! | `stretch` | the steps between two validations |
//! | `status` | what ranks exchange after each step |
//! | `driver` | what the loop asks of the optimizer inside the Learner |
//! | `of_update` | ... if that is an update |
//! | `data`, `sampler`, `loader` | which rank reads which items, in which order |
//! | `pace` | how fast it goes: the usual metrics |
//! | `items`, `summed` | outputs of models on their way to rank 0, which computes the metrics |

mod data;
mod driver;
mod epoch;
mod items;
mod launch;
mod loader;
mod of_update;
mod pace;
mod rank;
mod sampler;
mod silent;
mod status;
mod stretch;
mod summed;

use core::num::NonZeroU64;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, TrainLoader, TrainStep, TrainingBackend, TrainingComponents,
    TrainingModel, TrainingStrategy, ValidLoader,
};
use burn_ranks::thread::MODEL_STACK_BYTES;
use burn_ranks::{GroupOptions, ProcessGroup};

pub use driver::{Driver, EpochTail, Position, RankDriver, WriteRecord};
pub use items::RankItem;
pub use loader::{EpochItems, RankLoader, SampledLoader};
pub use pace::TrainingMetrics;
pub use sampler::{DistributedSampler, EpochOfRank, Tail};
pub use silent::SilentRenderer;
pub use summed::{BatchSums, SummedOutput};

use crate::UpdateError;
use crate::error::raise;
use driver::Counting;
use items::Format;
use launch::Fitted;
use pace::Pace;

type TrainInput<LC> = <TrainingModel<LC> as TrainStep>::Input;
type TrainItem<LC> = <TrainingModel<LC> as TrainStep>::Output;
type ValidItem<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;
type TrainData<LC> = Arc<dyn RankLoader<TrainingBackend<LC>, TrainInput<LC>>>;

/// Burn's training in the Learner, with one rank or several: threads of this program, or one
/// process each.
///
/// ```
/// # use std::{fmt::Display, sync::Arc};
/// # use burn::{backend::Autodiff, data::dataloader::DataLoader, module::AutodiffModule, optim::AdamWConfig};
/// # use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
/// # use burn::train::{InferenceStep, Learner, SupervisedTraining, TrainStep};
/// # use burn_flex::Flex;
/// # type B = Autodiff<Flex>;
/// # fn train<M>(
/// #     model: M,
/// #     train: Arc<dyn DataLoader<B, M::Input>>,
/// #     valid: Arc<dyn DataLoader<Flex, <M::InnerModule as InferenceStep>::Input>>,
/// # ) -> Result<(), burn_update::UpdateError>
/// # where
/// #     M: TrainStep + AutodiffModule<B> + Display + 'static,
/// #     M::InnerModule: InferenceStep,
/// # {
/// use burn_accum::AccumConfig;
/// use burn_update::Update;
/// # let cosine = CosineAnnealingLrSchedulerConfig::new(1e-3, 10_000).init().unwrap();
///
/// let update = Update::new(AdamWConfig::new().init()).accumulate(AccumConfig::mean(8))?;
/// let strategy = update.strategy().until_updates(10_000).validate_every(500)?;
/// let schedule = update.per_update(cosine);
///
/// SupervisedTraining::new("artifacts", train, valid)
///     .with_training_strategy(strategy.into())
///     .launch(Learner::new(model, update, schedule));
/// # Ok(())
/// # }
/// ```
///
/// With one rank it is Burn's training on one device, bit for bit: model, metrics, records,
/// validation, events, early stopping, interrupter. There are three differences. A window of
/// micro-batches that is open at the end of an epoch is applied with its true weights, before the
/// model is validated and recorded. Early stopping and the choice of records wait for the metrics
/// of an epoch's last items; Burn may decide before. A resumed training goes on with the order of
/// its epoch, where Burn begins with that of the first.
///
/// # By epochs or by updates
///
/// As in Burn an epoch is a pass over the data, after which the model is validated and recorded.
/// [`validate_every`](Self::validate_every) puts an interval of updates in its place, and
/// [`until_updates`](Self::until_updates) ends the training. `iteration` in Burn's progress counts
/// the updates of the epoch or interval before the item was shown, where Burn counts batches.
///
/// A training that is resumed within an epoch (`SupervisedTraining::checkpoint`) goes on with the
/// next batch: the record of an [`Update`](crate::Update) says which it is. It is bit for bit the
/// training that was not stopped if the loader gives the same batches in the same order: Burn's
/// loader or a [`SampledLoader`], with at most one worker, made anew with the same seed; with
/// dropout, [`with_seed`](Self::with_seed) too. (Several workers hand over batches in the order in
/// which they are ready.) The batches before are loaded and left out, and of
/// each epoch before, with a shuffling loader of Burn's, one.
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
    seed: Option<u64>,
    pace: Pace,
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
            seed: None,
            pace: Pace::default(),
        }
    }

    /// `world_size` ranks, each a thread. All compute on the model's device unless set by
    /// [`with_devices`](Self::with_devices).
    #[must_use]
    pub fn threads(mut self, world_size: usize) -> Self {
        let options = match self.ranks {
            Ranks::Threads(_, options) => options,
            Ranks::Process(_) => GroupOptions::default(),
        };
        self.ranks = Ranks::Threads(world_size, options);
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
        self.train_format = Some(Format::of_item());
        self.valid_format = Some(Format::of_item());
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

    /// Ends after so many updates since the training began, those before a resumption included,
    /// also within an epoch: as many passes over the data as that takes, whatever
    /// `SupervisedTraining::num_epochs` is.
    #[must_use]
    pub fn until_updates(mut self, updates: u64) -> Self {
        self.counting.until = Some(updates);
        self
    }

    /// Validates after every so many updates, also within an epoch, and then lets Burn's
    /// checkpointing strategy record, and early stopping decide. Such an interval takes the place of
    /// an epoch in all that is numbered: metrics, records, `SupervisedTraining::checkpoint`, the
    /// progress, whose last number is an estimate unless [`until_updates`](Self::until_updates) says
    /// it. The last interval may be shorter.
    ///
    /// # Errors
    ///
    /// [`UpdateError::InvalidValue`] if it is 0.
    pub fn validate_every(mut self, updates: usize) -> Result<Self, UpdateError> {
        let Some(interval) = NonZeroU64::new(updates as u64) else {
            return Err(UpdateError::InvalidValue {
                name: "updates between two validations",
                value: 0.0,
                expected: "at least 1",
            });
        };
        self.counting.interval = Some(interval);
        Ok(self)
    }

    /// Shows the bytes in use on rank 0's device with the other [`metrics`](Self::metrics), in MiB.
    /// `read` says them after each step, on the thread that trains: Burn's `Backend` has no such
    /// question. On CubeCL it is `client.memory_usage()?.bytes_in_use` of
    /// `CudaRuntime::client(&device)`.
    #[must_use]
    pub fn with_bytes_in_use(mut self, read: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        self.pace.reads_bytes_in_use(Arc::new(read));
        self
    }

    /// The metrics that people look at, for the Learner's renderer, its files and TensorBoard: the
    /// time of a step, items a second, the share of the time that waits for data, updates, the
    /// [memory in use](Self::with_bytes_in_use) if something says it, and what the parts of the
    /// update show: gradient norm, loss scale, skipped steps. They are of the last step when Burn
    /// computes metrics, which it does on another thread.
    ///
    /// ```
    /// # use burn::{backend::Autodiff, module::AutodiffModule, optim::AdamWConfig};
    /// # use burn::lr_scheduler::constant::ConstantLr;
    /// # use burn::train::{InferenceStep, Learner, LearningComponentsMarker, SupervisedTraining, TrainStep};
    /// # use burn_flex::Flex;
    /// # use std::fmt::Display;
    /// # type B = Autodiff<Flex>;
    /// # use burn_update::{Update, UpdateError};
    /// # fn train<M>(
    /// #     model: M,
    /// #     training: SupervisedTraining<LearningComponentsMarker<B, ConstantLr, M, Update<M, B>>>,
    /// # ) -> Result<(), UpdateError>
    /// # where
    /// #     M: TrainStep + AutodiffModule<B> + Display + Send + 'static,
    /// #     M::InnerModule: InferenceStep,
    /// # {
    /// use burn_accum::ClipByNorm;
    ///
    /// let update = Update::new(AdamWConfig::new().init()).clip_norm(1.0)?;
    /// let strategy = update.strategy();
    /// let training = training.metrics(strategy.metrics());
    /// training.with_training_strategy(strategy.into()).launch(Learner::new(model, update, ConstantLr::new(1e-3)));
    /// # Ok(())
    /// # }
    /// ```
    pub fn metrics(&self) -> TrainingMetrics {
        let mut gauges = self.pace.gauges();
        gauges.extend(self.driver.gauges());
        TrainingMetrics { gauges }
    }

    /// Seeds the backend's random generator before each step, by this seed, the epoch, the batch and
    /// the rank, so that dropout draws the same masks in a training that is resumed as in one that
    /// was not stopped. Records contain no generator. Ranks that are threads of one program share a
    /// CPU's generator, and draw in the order in which they come.
    #[must_use]
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = Some(seed);
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
        with_stack(|| match &self.ranks {
            Ranks::Process(group) if group.rank() != 0 => {
                self.train_in_silence(learner, train, valid, components)
            }
            _ => WithEvents(self).train(*learner, train, valid, components),
        })
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

/// Runs a training on this thread, with a new stack if too little is left of the thread's own for a
/// model that is large by value. State of the thread stays, such as a policy.
fn with_stack<R>(train: impl FnOnce() -> R) -> R {
    stacker::maybe_grow(MODEL_STACK_BYTES / 2, MODEL_STACK_BYTES, train)
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
