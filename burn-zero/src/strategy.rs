//! Training in Burn's `Learner` with several ranks: burn-update's loop, for a [`ZeroOptimizer`].
//!
//! [`ZeroOptimizer`]: crate::ZeroOptimizer

use std::any::type_name;
use std::sync::{Arc, OnceLock};

use burn::optim::GradientsParams;
use burn::tensor::Device;
use burn::train::{
    InferenceStep, Learner, LearningComponentsTypes, LearningResult, SupervisedLearningStrategy,
    SupervisedTrainingEventProcessor, TrainLoader, TrainStep, TrainingBackend, TrainingComponents,
    TrainingModel, TrainingStrategy, ValidLoader,
};
use burn_backend::Device as _;
use burn_ranks::{GroupOptions, ProcessGroup};
use burn_update::{
    Driver, RankDriver, RankItem, RankLoader, UpdateError, UpdateStrategy, WriteRecord,
};

use crate::ZeroError;
use crate::optimizer::{Ask, RankContext, Statistics};

type TrainInput<LC> = <TrainingModel<LC> as TrainStep>::Input;
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
/// those that are not rank 0 [stay silent](crate::SilentRenderer).
///
/// It is burn-update's loop, [`UpdateStrategy`], which says how the data is cut and who decides: with
/// one rank it is Burn's training on one device, bit for bit.
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
    strategy: UpdateStrategy<LC>,
}

impl<LC: LearningComponentsTypes + 'static> ZeroStrategy<LC> {
    /// `world_size` ranks, each a thread. All compute on the model's device unless set by
    /// [`with_devices`](Self::with_devices).
    pub fn threads(world_size: usize) -> Self {
        Self {
            strategy: UpdateStrategy::driven(ZeroDriver).threads(world_size),
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
            strategy: UpdateStrategy::driven(ZeroDriver).process(group),
        }
    }

    /// As [`UpdateStrategy::with_devices`].
    #[must_use]
    pub fn with_devices(self, devices: Vec<Device<TrainingBackend<LC>>>) -> Self {
        Self {
            strategy: self.strategy.with_devices(devices),
        }
    }

    /// As [`UpdateStrategy::with_train_loader`].
    #[must_use]
    pub fn with_train_loader<L>(self, loader: Arc<L>) -> Self
    where
        L: RankLoader<TrainingBackend<LC>, TrainInput<LC>> + 'static,
    {
        Self {
            strategy: self.strategy.with_train_loader(loader),
        }
    }

    /// As [`UpdateStrategy::with_train_metrics_of_rank_0`].
    #[must_use]
    pub fn with_train_metrics_of_rank_0(self) -> Self {
        Self {
            strategy: self.strategy.with_train_metrics_of_rank_0(),
        }
    }

    /// As [`UpdateStrategy::with_options`].
    #[must_use]
    pub fn with_options(self, of_group: GroupOptions) -> Self {
        Self {
            strategy: self.strategy.with_options(of_group),
        }
    }
}

impl<LC: LearningComponentsTypes + 'static> SupervisedLearningStrategy<LC> for ZeroStrategy<LC> {
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        self.strategy.train(learner, train, valid, components)
    }

    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        self.strategy.fit(components, learner, train, valid, epoch)
    }
}

/// For `SupervisedTraining::with_training_strategy`.
impl<LC: LearningComponentsTypes + 'static> From<ZeroStrategy<LC>> for TrainingStrategy<LC> {
    fn from(strategy: ZeroStrategy<LC>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

/// What the loop asks of a [`ZeroOptimizer`](crate::ZeroOptimizer).
struct ZeroDriver;

impl<LC: LearningComponentsTypes> Driver<LC> for ZeroDriver {
    fn check(&self, components: &TrainingComponents<LC>, _: usize) -> Result<(), UpdateError> {
        let Some(steps) = components.grad_accumulation else {
            return Ok(());
        };
        Err(UpdateError::Strategy(format!(
            "the Learner accumulates gradients itself (`grads_accumulation({steps})`), which knows nothing of ranks: use \
             burn-accum's `MultiSteps` around the ZeroOptimizer"
        )))
    }

    fn of_rank(
        &self,
        group: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Box<dyn RankDriver<LC>> {
        Box::new(ZeroRank {
            context: RankContext::new(group, device.to_id()),
            statistics: OnceLock::new(),
        })
    }
}

/// What the loop asks of it on one rank: messages to the optimizer, with the rank's context.
struct ZeroRank {
    context: Arc<RankContext>,
    /// The running statistics of the prepared model.
    statistics: OnceLock<Statistics>,
}

impl ZeroRank {
    fn ask<LC: LearningComponentsTypes>(
        &self,
        what: Ask,
        learner: &mut Learner<LC>,
    ) -> Result<(), UpdateError> {
        let step = || learner.optimizer_step(GradientsParams::new());
        self.context.ask(what, step).map(drop).map_err(of_update)
    }
}

impl<LC: LearningComponentsTypes> RankDriver<LC> for ZeroRank {
    fn on_thread(&self, train: &mut dyn FnMut()) {
        self.context.on_thread(train);
    }

    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        let step = || learner.optimizer_step(GradientsParams::new());
        let prepared = self.context.prepare(type_name::<LC::Optimizer>(), step);
        prepared.map_err(of_update)?;
        let statistics = Statistics::of::<TrainingBackend<LC>, _>(&learner.model());
        // A driver belongs to one training.
        let _ = self.statistics.set(statistics);
        Ok(())
    }

    fn share_statistics(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        let Some(statistics) = self.statistics.get() else {
            return Ok(());
        };
        let group = &*self.context.group;
        let shared = statistics.share::<TrainingBackend<LC>, _>(&learner.model(), group);
        shared.map_err(of_update)
    }

    fn gathers_parameters(&self) -> bool {
        self.context.gathers_units()
    }

    fn record(
        &self,
        learner: &mut Learner<LC>,
        write: Option<WriteRecord<'_, LC>>,
    ) -> Result<(), UpdateError> {
        self.ask(Ask::Whole, learner)?;
        self.ask(Ask::Record, learner)?;
        let written = self
            .context
            .write_record(write.map(|write| || write(learner)));
        written.map_err(of_update)?;
        self.ask(Ask::Sharded, learner)
    }

    fn finish(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        self.ask(Ask::Whole, learner)
    }
}

/// A fault of the group stays one, so that the rank that failed is named.
fn of_update(error: ZeroError) -> UpdateError {
    match error {
        ZeroError::Ranks(error) => UpdateError::Ranks(error),
        other => UpdateError::of_part("ranks", other),
    }
}
