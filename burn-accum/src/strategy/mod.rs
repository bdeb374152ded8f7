//! Training in Burn's `Learner` for a [`MultiSteps`](crate::MultiSteps): burn-update's loop, in which
//! windows end where epochs do.

mod progress;

use std::sync::Arc;

use burn::{
    optim::GradientsParams,
    tensor::{Device, backend::AutodiffBackend},
    train::{
        Learner, LearningComponentsTypes, SupervisedLearningStrategy,
        SupervisedTrainingEventProcessor, TrainLoader, TrainingBackend, TrainingComponents,
        TrainingModel, TrainingStrategy, ValidLoader,
    },
};

use burn_decorator::message::{self, short_name};
use burn_ranks::ProcessGroup;
use burn_update::{Driver, EpochTail, RankDriver, UpdateError, UpdateStrategy};

pub use progress::AccumProgress;

use crate::{AccumError, UpdateCounter};

/// Burn's training on one device, for an optimizer with a [`MultiSteps`](crate::MultiSteps) in it:
/// the last window of an epoch is applied with its true weights before the model is validated and
/// recorded.
///
/// Everything else is as Burn does it: metrics, validation, records, resuming, early stopping,
/// interrupter, summary, events. With windows of one micro-batch the two are the same, bit for bit.
/// The only difference: early stopping and the choice of records wait for the metrics of an epoch's
/// last items; Burn may decide before.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use burn::{backend::Autodiff, data::dataloader::DataLoader, lr_scheduler::constant::ConstantLr, optim::{AdamWConfig, GradientsParams}};
/// # use burn::{prelude::*, train::{InferenceStep, Learner, SupervisedTraining, TrainOutput, TrainStep}};
/// # use burn_flex::Flex;
/// # #[derive(Module, Debug)]
/// # struct Model<B: Backend> { linear: nn::Linear<B> }
/// # impl TrainStep for Model<Autodiff<Flex>> {
/// #     type Input = ();
/// #     type Output = ();
/// #     fn step(&self, _: ()) -> TrainOutput<()> { TrainOutput { grads: GradientsParams::new(), item: () } }
/// # }
/// # impl InferenceStep for Model<Flex> {
/// #     type Input = ();
/// #     type Output = ();
/// #     fn step(&self, _: ()) {}
/// # }
/// # fn train(
/// #     model: Model<Autodiff<Flex>>,
/// #     train: Arc<dyn DataLoader<Autodiff<Flex>, ()>>,
/// #     valid: Arc<dyn DataLoader<Flex, ()>>,
/// # ) -> Result<(), burn_accum::AccumError> {
/// use burn_accum::{AccumConfig, AccumulatingStrategy, MultiSteps};
///
/// let optimizer = MultiSteps::new(AdamWConfig::new().init(), AccumConfig::mean(8))?;
/// let strategy = AccumulatingStrategy::new(&optimizer.updates());
///
/// SupervisedTraining::new("artifacts", train, valid)
///     .num_epochs(3)
///     .with_training_strategy(strategy.into()) // the one line more
///     .launch(Learner::new(model, optimizer, ConstantLr::new(1e-3)));
/// # Ok(())
/// # }
/// ```
///
/// # What is counted
///
/// `items` in Burn's progress are those of the data loader. `iteration` is the number of *updates*
/// in the epoch before the item was shown, where Burn counts batches: with windows of one there is
/// no difference. [`AccumProgress`] shows micro-batches and updates side by side,
/// [`UpdatesMetric`](crate::UpdatesMetric) plots updates since the training began. The update that
/// ends the epoch comes after the epoch's last item.
///
/// The scheduler is stepped once a micro-batch, as in Burn: [`PerUpdate`](crate::PerUpdate) makes
/// it once an update, the one at the end of the epoch included.
///
/// A `TrainStep::optimize` of your own is also called when training begins and when windows are
/// applied, without gradients.
///
/// # When it stops early
///
/// As in Burn, an interrupted epoch is neither validated nor recorded, and training resumes from
/// the record of the epoch before. The returned model has seen every micro-batch: the partial
/// window is applied to it.
///
/// # Panics
///
/// Before the first step, with the message of an [`AccumError`]:
/// [`NoMultiSteps`](AccumError::NoMultiSteps) if nothing in the Learner's optimizer counts updates
/// in the counter that the strategy was made with,
/// [`SecondAccumulation`](AccumError::SecondAccumulation) beside Burn's own `grads_accumulation`.
/// Steps panic as those of a `MultiSteps`.
#[derive(Clone, Debug)]
pub struct AccumulatingStrategy<B: AutodiffBackend> {
    updates: UpdateCounter,
    device: Option<Device<B>>,
    tail: EpochTail,
}

impl<B: AutodiffBackend> AccumulatingStrategy<B> {
    /// Trains where the model is (its first parameter), as Burn's Learner does by default;
    /// `updates` are those of the `MultiSteps` that goes into the Learner: see
    /// [`MultiSteps::updates`](crate::MultiSteps::updates).
    pub fn new(updates: &UpdateCounter) -> Self {
        Self {
            updates: updates.clone(),
            device: None,
            tail: EpochTail::default(),
        }
    }

    /// Trains on `device`, as `ExecutionStrategy::SingleDevice`.
    #[must_use]
    pub fn with_device(mut self, device: Device<B>) -> Self {
        self.device = Some(device);
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

impl<LC: LearningComponentsTypes + 'static> SupervisedLearningStrategy<LC>
    for AccumulatingStrategy<TrainingBackend<LC>>
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        let driver = Windows {
            updates: self.updates.clone(),
        };
        let mut strategy = UpdateStrategy::driven(driver).with_tail(self.tail);
        if let Some(device) = &self.device {
            strategy = strategy.with_devices(vec![device.clone()]);
        }
        strategy.fit(components, learner, train, valid, epoch)
    }
}

/// For `SupervisedTraining::with_training_strategy`.
impl<LC> From<AccumulatingStrategy<TrainingBackend<LC>>> for TrainingStrategy<LC>
where
    LC: LearningComponentsTypes + 'static,
{
    fn from(strategy: AccumulatingStrategy<TrainingBackend<LC>>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}

/// What the loop asks of a [`MultiSteps`](crate::MultiSteps), whose counter this is.
#[derive(Clone)]
struct Windows {
    updates: UpdateCounter,
}

impl<LC: LearningComponentsTypes> Driver<LC> for Windows {
    fn check(&self, components: &TrainingComponents<LC>, _: usize) -> Result<(), UpdateError> {
        match components.grad_accumulation {
            Some(steps) => Err(AccumError::SecondAccumulation { steps }.into()),
            None => Ok(()),
        }
    }

    fn of_rank(
        &self,
        _: Arc<dyn ProcessGroup>,
        device: Device<TrainingBackend<LC>>,
    ) -> Box<dyn RankDriver<LC>> {
        Box::new(WindowsOn::<TrainingBackend<LC>> {
            updates: self.updates.clone(),
            device,
        })
    }
}

/// What the loop asks of it on its one rank.
struct WindowsOn<B: AutodiffBackend> {
    updates: UpdateCounter,
    device: Device<B>,
}

impl<LC: LearningComponentsTypes> RankDriver<LC> for WindowsOn<TrainingBackend<LC>> {
    /// Also checks that the optimizer uses this counter. It sends a request, because wrappers do
    /// not expose what they wrap.
    fn prepare(&self, learner: &mut Learner<LC>) -> Result<(), UpdateError> {
        learner.fork(&self.device);
        let before = self.updates.answers();
        message::describe(|| learner.optimizer_step(GradientsParams::new()));
        if self.updates.answers() == before {
            let optimizer = short_name::<LC::Optimizer>();
            return Err(AccumError::NoMultiSteps { optimizer }.into());
        }
        Ok(())
    }

    fn updates(&self) -> Option<u64> {
        Some(self.updates.updates())
    }
}
