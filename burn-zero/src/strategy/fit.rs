//! A strategy at work: what Burn calls, and the rank or the ranks of this process that it starts.

use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::tensor::Device;
use burn::train::{
    EventProcessorTraining, Learner, LearningComponentsTypes, LearningResult,
    SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainingBackend,
    TrainingComponents, TrainingModel, ValidLoader,
};

use super::items::Items;
use super::rank::{Epochs, Front, Rank};
use super::split::split;
use super::{Ranks, StrategyError, ZeroStrategy, device};
use crate::group::{ProcessGroup, SingleRank};
use crate::{ZeroError, raise};

impl<LC: LearningComponentsTypes> ZeroStrategy<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    fn try_fit(&self, start: Start<LC>) -> Result<Fitted<LC>, ZeroError> {
        if let Some(steps) = start.components.grad_accumulation {
            return Err(StrategyError::SecondAccumulation { steps }.into());
        }
        match &self.ranks {
            Ranks::Threads { world_size, .. } if *world_size > 1 => self.fit_threads(start),
            Ranks::Threads {
                world_size: 1,
                devices,
                ..
            } => {
                let device = devices.as_ref().and_then(|devices| devices.first());
                self.fit_process(start, Arc::new(SingleRank::new()), device)
            }
            Ranks::Threads { .. } => Err(ZeroError::InvalidSetting {
                setting: "world_size",
                value: "0".to_owned(),
                expected: "at least 1",
            }),
            Ranks::Process { group, device } => {
                self.fit_process(start, group.clone(), device.as_ref())
            }
        }
    }

    fn fit_process(
        &self,
        start: Start<LC>,
        group: Arc<dyn ProcessGroup>,
        device: Option<&Device<TrainingBackend<LC>>>,
    ) -> Result<Fitted<LC>, ZeroError> {
        let device = device.cloned().unwrap_or_else(|| start.device());
        let (ranks, own) = (group.world_size(), group.rank());
        let train = match self.loaders.split_training() {
            true => start.train.clone(),
            false => split(&start.train, ranks, self.uneven)?.swap_remove(own),
        };
        let components = start.components;
        let front = Front {
            processor: components.event_processor,
            checkpointer: components.checkpointer,
            early_stopping: components.early_stopping,
        };
        // What is not shown is kept: it holds the renderer.
        let (front, silent) = match own {
            0 => (Some(front), None),
            _ => (None, Some(front.processor)),
        };
        let rank = Rank {
            group,
            device,
            learner: start.learner,
            train,
            valid: start.valid,
            train_items: Items::of_process(self.train_carrier),
            valid_items: Items::of_process(self.valid_carrier),
            interrupter: components.interrupter,
            store: components.event_store,
            epochs: Epochs {
                first: start.epoch,
                last: components.num_epochs,
                uneven: self.uneven,
                loaders: self.loaders,
            },
            epoch_end: self.epoch_end.clone(),
            front,
        };
        let (model, shown) = rank.run()?;
        match shown.or(silent) {
            Some(processor) => Ok((model, processor)),
            None => unreachable!("a process has one processor"),
        }
    }
}

/// What a training begins with.
pub(super) struct Start<LC: LearningComponentsTypes> {
    pub(super) components: TrainingComponents<LC>,
    pub(super) learner: Learner<LC>,
    pub(super) train: TrainLoader<LC>,
    pub(super) valid: ValidLoader<LC>,
    pub(super) epoch: usize,
}

impl<LC: LearningComponentsTypes> Start<LC> {
    /// Where the model is, as Burn's Learner has it by default.
    pub(super) fn device(&self) -> Device<TrainingBackend<LC>> {
        device::of::<TrainingBackend<LC>, _>(&self.learner.model())
    }
}

pub(super) type Fitted<LC> = (TrainingModel<LC>, SupervisedTrainingEventProcessor<LC>);

impl<LC: LearningComponentsTypes> SupervisedLearningStrategy<LC> for ZeroStrategy<LC> {
    /// Burn's own where something is shown; elsewhere without events.
    fn train(
        &self,
        learner: Learner<LC>,
        train: TrainLoader<LC>,
        valid: ValidLoader<LC>,
        components: TrainingComponents<LC>,
    ) -> LearningResult<LC::InferenceModel> {
        if self.is_front() {
            return Shown(self).train(learner, train, valid, components);
        }
        let (mut learner, mut epoch) = (learner, 1);
        if let Some(saved) = components.checkpoint {
            if let Some(checkpointer) = &components.checkpointer {
                learner = checkpointer.load_checkpoint(learner, &Default::default(), saved);
            }
            epoch = saved + 1;
        }
        let (model, processor) = self.fit(components, learner, train, valid, epoch);
        LearningResult {
            model: model.valid(),
            renderer: processor.renderer(),
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
        raise(self.try_fit(Start {
            components,
            learner,
            train,
            valid,
            epoch,
        }))
    }
}

/// What Burn does around every strategy.
struct Shown<'a, LC: LearningComponentsTypes>(&'a ZeroStrategy<LC>);

impl<LC: LearningComponentsTypes> SupervisedLearningStrategy<LC> for Shown<'_, LC> {
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
