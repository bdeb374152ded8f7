//! Burn's training loop on one device, in which windows end where epochs do.

mod progress;
mod training;

use std::sync::Arc;

use burn::{
    data::dataloader::Progress,
    optim::GradientsParams,
    tensor::{
        Device,
        backend::{AutodiffBackend, DeviceOps},
    },
    train::{
        Learner, LearningComponentsTypes, SupervisedLearningStrategy,
        SupervisedTrainingEventProcessor, TrainLoader, TrainingBackend, TrainingComponents,
        TrainingModel, TrainingStrategy, ValidLoader,
    },
};

use burn_decorator::device::device_of;
use burn_decorator::message::{self, short_name};

pub use progress::AccumProgress;

use crate::{AccumError, UpdateCounter, multi_steps::raise};
use training::Training;

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

/// What happens to a window that is not complete when an epoch ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EpochTail {
    /// It is an update, of the micro-batches that are in it (Accelerate, Lightning; these divide by
    /// the full length). The default.
    #[default]
    Apply,
    /// It continues in the next epoch (DeepSpeed), and the record holds it. Use it where epochs
    /// only interrupt an endless stream to validate and to save. A window open at the end of
    /// training is applied to the returned model, and also remains in the record: training that is
    /// resumed continues as if it had not ended.
    Carry,
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

    /// Whether the optimizer uses this strategy's counter. It sends a request, because wrappers do
    /// not expose what they wrap.
    fn check_optimizer<LC>(&self, learner: &mut Learner<LC>) -> Result<(), AccumError>
    where
        LC: LearningComponentsTypes<Backend = B>,
    {
        let before = self.updates.answers();
        message::describe(|| learner.optimizer_step(GradientsParams::new()));
        if self.updates.answers() == before {
            return Err(AccumError::NoMultiSteps {
                optimizer: short_name::<LC::Optimizer>(),
            });
        }
        Ok(())
    }
}

impl<LC: LearningComponentsTypes> SupervisedLearningStrategy<LC>
    for AccumulatingStrategy<TrainingBackend<LC>>
{
    fn fit(
        &self,
        components: TrainingComponents<LC>,
        mut learner: Learner<LC>,
        dataloader_train: TrainLoader<LC>,
        dataloader_valid: ValidLoader<LC>,
        starting_epoch: usize,
    ) -> (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>) {
        if let Some(steps) = components.grad_accumulation {
            raise(Err(AccumError::SecondAccumulation { steps }))
        }
        let device = match &self.device {
            Some(device) => device.clone(),
            None => device_of::<TrainingBackend<LC>, _>(&learner.model()),
        };
        learner.fork(&device);
        raise(self.check_optimizer(&mut learner));

        let mut training = Training {
            learner,
            train: dataloader_train.to_device(&device),
            valid: dataloader_valid.to_device(device.inner()),
            processor: components.event_processor,
            interrupter: components.interrupter,
            updates: self.updates.clone(),
            micro_batches: 0,
        };
        let mut checkpointer = components.checkpointer;
        let mut early_stopping = components.early_stopping;
        let store = components.event_store;

        for epoch in starting_epoch..=components.num_epochs {
            let progress = Progress::new(epoch, components.num_epochs);
            training.train(&progress, self.tail);
            if training.is_interrupted() {
                break;
            }
            training.validate(&progress);
            if let Some(checkpointer) = &mut checkpointer {
                checkpointer.checkpoint(&training.learner, epoch, &store);
            }
            if let Some(early_stopping) = &mut early_stopping
                && early_stopping.should_stop(epoch, &store)
            {
                break;
            }
        }
        if self.tail == EpochTail::Carry {
            training.apply_window();
        }
        (training.learner.model(), training.processor)
    }
}

/// For `SupervisedTraining::with_training_strategy`.
impl<LC> From<AccumulatingStrategy<TrainingBackend<LC>>> for TrainingStrategy<LC>
where
    LC: LearningComponentsTypes,
{
    fn from(strategy: AccumulatingStrategy<TrainingBackend<LC>>) -> Self {
        Self::Custom(Arc::new(strategy))
    }
}
