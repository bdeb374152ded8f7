//! Training in Burn's `Learner` with several ranks.
//!
//! `launch.rs` starts the ranks; `rank.rs` is the loop over epochs that each rank runs, with the
//! training and the validation of `epoch.rs`. `data.rs` cuts the data, or `loader.rs` samples it,
//! `items.rs` sends items to rank 0 for the metrics.

mod data;
mod epoch;
mod items;
mod launch;
mod loader;
mod rank;
mod summed;

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::train::metric::MetricDefinition;
use burn::train::renderer::{
    EvaluationName, EvaluationProgress, MetricState, MetricsRenderer, MetricsRendererEvaluation,
    MetricsRendererTraining, ProgressType, TrainingProgress,
};
use burn::train::{
    EventProcessorTraining, InferenceStep, Learner, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, TrainLoader, TrainStep, TrainingBackend, TrainingComponents,
    TrainingModel, TrainingStrategy, ValidLoader,
};
use burn_ranks::{GroupOptions, ProcessGroup};

pub use items::RankItem;
pub use loader::{EpochItems, RankLoader, SampledLoader};
pub use summed::{BatchSums, SummedOutput};

use crate::raise;
use crate::stack::with_stack_for_training;
use items::Format;
use launch::Fitted;

type TrainItem<LC> = <TrainingModel<LC> as TrainStep>::Output;
type ValidItem<LC> = <<LC as LearningComponentsTypes>::InferenceModel as InferenceStep>::Output;

/// Burn's training with ranks: threads of this program, or one process a rank.
///
/// Two lines change in a program that trains with a Learner: the optimizer, and the strategy.
/// Model, `TrainStep`, loaders and metrics stay. The optimizer is made without the types of the
/// model, `.init()`, for the `ZeroOptimizer` runs it on
/// [`ParameterShards`](crate::ParameterShards). At stage 3 of several ranks rank 0 has the trained
/// model, whole, in its host's memory; on other processes its parameters cannot be read. A Learner
/// initialises its whole model: where that does not fit the device, give it
/// [`offload_parameters`](crate::offload_parameters)`::<B, _>(model)?`, or between processes
/// [`shard_parameters`](crate::shard_parameters)`(model, &group)?`.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn::{backend::Autodiff, data::dataloader::DataLoader, lr_scheduler::constant::ConstantLr, optim::{AdamWConfig, GradientsParams}};
/// # use burn::{prelude::*, train::{InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep}};
/// # use burn_flex::Flex;
/// # use burn_zero::Sharded;
/// # type B = Sharded<Autodiff<Flex>>;
/// # #[derive(Module, Debug)]
/// # struct Model<B: Backend> { linear: nn::Linear<B> }
/// # impl TrainStep for Model<B> {
/// #     type Input = ();
/// #     type Output = ();
/// #     fn step(&self, _: ()) -> TrainOutput<()> { TrainOutput { grads: GradientsParams::new(), item: () } }
/// # }
/// # impl<I: Backend> InferenceStep for Model<I> {
/// #     type Input = ();
/// #     type Output = ();
/// #     fn step(&self, _: ()) {}
/// # }
/// # type Valid = <B as burn::tensor::backend::AutodiffBackend>::InnerBackend;
/// # fn train(model: Model<B>, train: Arc<dyn DataLoader<B, ()>>, valid: Arc<dyn DataLoader<Valid, ()>>) {
/// use burn_zero::{ZeroSettings, Stage, ZeroOptimizer, ZeroStrategy};
///
/// let adam = AdamWConfig::new().init();
/// let optimizer = ZeroOptimizer::in_learner(adam, ZeroSettings::stage(Stage::Gradients)); // instead of `adam`
///
/// SupervisedTraining::new("artifacts", train, valid)
///     .num_epochs(3)
///     .with_training_strategy(ZeroStrategy::threads(4).into()) // the one line more
///     .launch(Learner::new(model, optimizer, ConstantLr::new(1e-3)));
/// # }
/// ```
///
/// Under `mpirun -n 4 program` the strategy is
/// `ZeroStrategy::process(Arc::new(MpiGroup::init()?))`, and every process runs all of the program;
/// those that are not rank 0 [stay silent](SilentRenderer).
///
/// With one rank it is Burn's training on one device, bit for bit: model, metrics, records,
/// validation, events, resuming, early stopping, interrupter. The only difference: early stopping
/// and the choice of records wait for the metrics of an epoch's last items; Burn may decide before.
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
/// # Records
///
/// Records are Burn's, of the whole model and its optimizer's whole state, written by rank 0, which
/// gathers the state tensor by tensor at the end of each epoch. They are interchangeable between
/// any numbers of ranks and training without ranks. Each rank reads them whole; if that is too
/// much, use [`save_sharded`](crate::save_sharded) in a loop of your own. State of wrappers is rank
/// 0's. Burn's records contain no generator: dropout draws other numbers after a resumption, unless
/// the loader seeds the backend at the start of each epoch.
///
/// Burn writes in the background. Where a rank that is a thread has failed and the process must
/// end, the files that are being written are finished first.
///
/// # Wrappers
///
/// A loss scaler and an accumulation of gradients wrap the `ZeroOptimizer`; clipping is inside it.
/// Ranks that are threads train copies of the Learner, each with loss scales, counters and running
/// statistics of its own; the user's handles are those of rank 0. Wrappers of one's own that share
/// state between clones follow [`burn_decorator::ranks`]. At the end of an epoch all ranks get the
/// running statistics of rank 0, and an open accumulation window is applied with its true weights,
/// before validation and record.
///
/// The strategy sends messages to the optimizer, as steps without gradients
/// ([`burn_decorator::message`]): one before the first step, one at the end of an epoch, and one
/// for a record. A custom `TrainStep::optimize` is called with them too.
///
/// # Cost
///
/// With any number of ranks a record takes the whole optimizer's state once more on rank 0's
/// device, at the end of each epoch, also if the checkpointer then writes none. One rank has no
/// other cost. With `N`, beside the [`ZeroOptimizer`](crate::ZeroOptimizer)'s: one small collective
/// a step, the status of each rank in some hundred bytes of JSON; between processes a second, in
/// which each sends a batch's outputs to rank 0 (none with
/// [`with_train_metrics_of_rank_0`](Self::with_train_metrics_of_rank_0)); for a record each rank's
/// part of the optimizer's state, to rank 0; running statistics once an epoch. Burn's Learner keeps
/// the old parameters during a step, with any strategy, which doubles the bytes of parameters.
///
/// # Panics
///
/// Before the first step with the message of a [`ZeroError`](crate::ZeroError). A rank that panics
/// ends all ranks, with its message: at once if they wait for it. A thread cannot be ended from
/// outside: if one hangs, the process ends with the message on stderr; see
/// [`GroupOptions::deadline`].
pub struct ZeroStrategy<LC: LearningComponentsTypes> {
    ranks: Ranks,
    devices: Option<Vec<Device<TrainingBackend<LC>>>>,
    train_loader: Option<TrainData<LC>>,
    train_metrics: TrainMetrics,
    train_format: Option<Format<TrainItem<LC>>>,
    valid_format: Option<Format<ValidItem<LC>>>,
}

type TrainInput<LC> = <TrainingModel<LC> as TrainStep>::Input;
type TrainData<LC> = Arc<dyn RankLoader<TrainingBackend<LC>, TrainInput<LC>>>;

/// Of whose batches the metrics of training are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TrainMetrics {
    AllRanks,
    Rank0,
}

enum Ranks {
    /// The number of threads.
    Threads(usize, GroupOptions),
    Process(Arc<dyn ProcessGroup>),
}

impl<LC: LearningComponentsTypes> ZeroStrategy<LC> {
    /// `world_size` ranks, each a thread. All compute on the model's device unless set by
    /// [`with_devices`](Self::with_devices).
    pub fn threads(world_size: usize) -> Self {
        let options = GroupOptions::default();
        Self {
            ranks: Ranks::Threads(world_size, options),
            devices: None,
            train_loader: None,
            train_metrics: TrainMetrics::AllRanks,
            train_format: None,
            valid_format: None,
        }
    }

    /// One rank, which is this process; the group's others are processes that run the same program.
    ///
    /// It computes on the device of the Learner's model unless [`with_devices`](Self::with_devices)
    /// sets another. Where a machine has several GPUs, the default device is the first of them in
    /// every process: [`local_rank`](burn_ranks::local_rank()) numbers the processes.
    ///
    /// ```text
    /// let device = CudaDevice::new(local_rank().unwrap_or(0));
    /// let learner = Learner::new(config.init(&device), optimizer, scheduler);
    /// ZeroStrategy::process(group).with_devices(vec![device])
    /// ```
    pub fn process(group: Arc<dyn ProcessGroup>) -> Self
    where
        TrainItem<LC>: RankItem,
        ValidItem<LC>: RankItem,
    {
        Self {
            ranks: Ranks::Process(group),
            devices: None,
            train_loader: None,
            train_metrics: TrainMetrics::AllRanks,
            train_format: Some((RankItem::into_bytes, RankItem::from_bytes)),
            valid_format: Some((RankItem::into_bytes, RankItem::from_bytes)),
        }
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
}

impl<LC: LearningComponentsTypes + 'static> SupervisedLearningStrategy<LC> for ZeroStrategy<LC> {
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
        with_stack_for_training(|| match &self.ranks {
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

impl<LC: LearningComponentsTypes + 'static> ZeroStrategy<LC> {
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
struct WithEvents<'a, LC: LearningComponentsTypes>(&'a ZeroStrategy<LC>);

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
impl<LC: LearningComponentsTypes + 'static> From<ZeroStrategy<LC>> for TrainingStrategy<LC> {
    fn from(strategy: ZeroStrategy<LC>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

/// Shows nothing. Burn makes its own renderer, which takes over the terminal, before it calls a
/// strategy: so set this one in processes other than rank 0.
///
/// ```no_run
/// # use burn::train::{LearningComponentsTypes, SupervisedTraining};
/// # use burn_zero::{ProcessGroup, SilentRenderer};
/// # fn quiet<LC: LearningComponentsTypes + Send + 'static>(mut training: SupervisedTraining<LC>, group: &dyn ProcessGroup) -> SupervisedTraining<LC> {
/// if group.rank() != 0 {
///     training = training.renderer(SilentRenderer).with_application_logger(None);
/// }
/// # training
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct SilentRenderer;

impl MetricsRendererTraining for SilentRenderer {
    fn update_train(&mut self, _: MetricState) {}
    fn update_valid(&mut self, _: MetricState) {}
    fn render_train(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
    fn render_valid(&mut self, _: TrainingProgress, _: Vec<ProgressType>) {}
}

impl MetricsRendererEvaluation for SilentRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}
    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for SilentRenderer {
    fn manual_close(&mut self) {}
    fn register_metric(&mut self, _: MetricDefinition) {}
}
