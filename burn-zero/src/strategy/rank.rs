//! One rank's training: Burn's loop over epochs, in which all ranks take each decision together.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::module::Module;
use burn::optim::GradientsParams;
use burn::tensor::{Device, backend::DeviceOps};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    LearningCheckpointer, LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader,
    TrainingBackend, TrainingItem, TrainingModel, ValidLoader,
};
use burn_backend::Device as _;

use super::items::Items;
use super::records;
use super::split::check_parts;
use super::word::{Word, Words};
use super::{Loaders, StrategyError, TrainItem, Uneven, ValidItem};
use crate::ZeroError;
use crate::group::{Agree, ProcessGroup};
use crate::optimizer::rank_context::{Leave, RankContext, Setting};
use crate::optimizer::{Parameters, Statistics, attach_to, prepare};

/// What each rank has.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) device: Device<TrainingBackend<LC>>,
    pub(super) learner: Learner<LC>,
    /// This rank's part.
    pub(super) train: TrainLoader<LC>,
    /// All of it, of which this rank validates its share; its part, if the processes have loaded parts.
    pub(super) valid: ValidLoader<LC>,
    pub(super) train_items: Items<TrainItem<LC>>,
    pub(super) valid_items: Items<ValidItem<LC>>,
    pub(super) interrupter: Interrupter,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) epochs: Epochs,
    pub(super) epoch_end: Option<EpochEnd<LC>>,
    /// Rank 0 has it.
    pub(super) front: Option<Front<LC>>,
}

/// What all ranks must have alike.
#[derive(Clone, Copy)]
pub(super) struct Epochs {
    pub(super) first: usize,
    pub(super) last: usize,
    pub(super) uneven: Uneven,
    pub(super) loaders: Loaders,
}

/// What the user sees, and what is decided by it.
pub(super) struct Front<LC: LearningComponentsTypes> {
    pub(super) processor: SupervisedTrainingEventProcessor<LC>,
    pub(super) checkpointer: Option<LearningCheckpointer<LC>>,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// Asks for something at the end of each epoch.
pub(super) type EpochEnd<LC> =
    Arc<dyn Fn(&Device<TrainingBackend<LC>>) -> GradientsParams + Send + Sync>;

/// What is left of a training.
pub(super) type Trained<LC> = (
    TrainingModel<LC>,
    Option<SupervisedTrainingEventProcessor<LC>>,
);

impl<LC: LearningComponentsTypes> Rank<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn run(mut self) -> Result<Trained<LC>, ZeroError> {
        self.train = self.train.to_device(&self.device);
        self.valid = self.valid.to_device(self.device.inner());
        self.learner.fork(&self.device);
        let items = self.check()?;
        let context = RankContext::new(self.group.clone(), self.device.to_id());
        let (leave, statistics) = self.sit_down(&context)?;

        for epoch in self.epochs.first..=self.epochs.last {
            let progress = Progress::new(epoch, self.epochs.last);
            self.train(&progress, items)?;
            // What is validated, recorded and returned is one model.
            let model = self.learner.model();
            statistics.share::<TrainingBackend<LC>, _>(&model, &*self.group)?;
            if self.is_interrupted()? {
                break;
            }
            self.validate(&progress)?;
            self.save(epoch, &context)?;
            if self.stops_early(epoch)? {
                break;
            }
        }
        drop(leave);
        Ok((
            self.learner.model(),
            self.front.map(|front| front.processor),
        ))
    }

    pub(super) fn rank(&self) -> usize {
        self.group.rank()
    }

    pub(super) fn ranks(&self) -> usize {
        self.group.world_size()
    }

    /// The items that all ranks train on in an epoch.
    fn check(&self) -> Result<usize, ZeroError> {
        let Epochs {
            first,
            last,
            uneven,
            loaders,
        } = self.epochs;
        let (train, valid) = (self.train.num_items(), self.valid.num_items());
        let held = match loaders {
            Loaders::Whole => format!("{train} items to train on and {valid} to validate on"),
            Loaders::TrainSplit => format!("{valid} items to validate on"),
            Loaders::Split => "data in parts".to_owned(),
        };
        let text =
            format!("epochs {first} to {last}, {held}, Uneven::{uneven:?}, Loaders::{loaders:?}");
        self.group.agree_equal("training", &text)?;
        if !loaders.split_training() {
            return Ok(train * self.ranks());
        }
        if loaders == Loaders::Split && self.ranks() > 1 && !self.valid_items.are_shared() {
            return Err(StrategyError::ItemsStay.into());
        }
        let parts = self
            .group
            .gather_i64("items to train on", train as i64)?
            .into_iter();
        let parts: Vec<_> = parts.map(|items| items as usize).collect();
        check_parts(&parts, uneven)?;
        Ok(parts.iter().sum())
    }

    /// The learner's optimizer gets its ranks, and the learner the weights of rank 0. Its running statistics are returned.
    fn sit_down(&mut self, context: &Arc<RankContext>) -> Result<(Leave, Statistics), ZeroError> {
        let leave = context.put();
        records::ask(&self.learner, &self.store);
        let mut answers = context.take_answers();
        let found = answers.len();
        let (Some(request), 1) = (answers.pop(), found) else {
            let optimizer = core::any::type_name::<LC::Optimizer>();
            return Err(StrategyError::NoZeroOptimizer { optimizer, found }.into());
        };
        self.group
            .agree_equal("settings", &format!("{:?}", request.settings))?;
        // A Learner takes no other model than that it was made with.
        let model = self.learner.model();
        let shared = Statistics::find_shared::<TrainingBackend<LC>, _>(&model, &*self.group)?;
        if let Some(statistic) = shared {
            return Err(StrategyError::SharedStatistics { statistic }.into());
        }
        let (model, reducer) = prepare::<TrainingBackend<LC>, _>(model, &self.group, request)?;
        // Burn's `fork` has taken tied parameters apart. In the record they are one leaf again, and loading keeps it.
        if self.ranks() > 1 || Parameters::of::<TrainingBackend<LC>, _>(&model).tied {
            self.learner.load_model(model.into_record());
        }
        let model = self.learner.model();
        let ids = attach_to::<TrainingBackend<LC>, _>(&reducer, &model);
        context.set(Setting { reducer, ids });
        Ok((leave, Statistics::of::<TrainingBackend<LC>, _>(&model)))
    }

    /// What all say after a step.
    pub(super) fn exchange(
        &self,
        what: &str,
        epoch: usize,
        iteration: usize,
        items: usize,
        lr: Option<f64>,
    ) -> Result<Words, ZeroError> {
        let own = Word::new(items, lr, &self.interrupter);
        let label = format!("{what}, epoch {epoch}, step {iteration}");
        Words::exchange(&*self.group, &label, own)
    }

    /// Whether any rank was interrupted; the reason goes to the log.
    fn is_interrupted(&self) -> Result<bool, ZeroError> {
        let words = Words::exchange(
            &*self.group,
            "end of the epoch",
            Word::new(0, None, &self.interrupter),
        )?;
        let interrupted = words.stop(&self.interrupter);
        if interrupted {
            let reason = self.interrupter.get_message();
            let reason = reason.unwrap_or_else(|| "Reason unknown".to_owned());
            log::info!("Training interrupted: {reason}");
        }
        Ok(interrupted)
    }

    /// Rank 0 writes, if it is the time.
    fn save(&mut self, epoch: usize, context: &RankContext) -> Result<(), ZeroError> {
        let (learner, store) = (&self.learner, &*self.store);
        match &mut self.front {
            Some(Front {
                checkpointer: Some(checkpointer),
                ..
            }) => context.announce(|| checkpointer.checkpoint(learner, epoch, store)),
            Some(_) => context.announce(|| ()),
            None => context.attend(|| records::ask(learner, store)),
        }
    }

    /// Rank 0 decides.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, ZeroError> {
        let early_stopping = self
            .front
            .as_mut()
            .and_then(|front| front.early_stopping.as_mut());
        let own = early_stopping.is_some_and(|stopping| stopping.should_stop(epoch, &self.store));
        self.group.agree_any("early stopping", own)
    }
}

impl<LC: LearningComponentsTypes> Front<LC> {
    pub(super) fn show_train(&mut self, item: TrainingItem<TrainItem<LC>>) {
        self.processor
            .process_train(LearnerEvent::ProcessedItem(item));
    }

    pub(super) fn show_valid(
        &mut self,
        item: ValidItem<LC>,
        progress: Progress,
        epochs: &Progress,
        iteration: usize,
    ) {
        let item = TrainingItem::new(item, progress, epochs.clone(), Some(iteration), None);
        self.processor
            .process_valid(LearnerEvent::ProcessedItem(item));
    }

    /// Waits until the metrics of all items are with the loggers, where early stopping and the choice of records look for
    /// them; Burn may decide without the last ones.
    ///
    /// The channel to the thread that computes metrics holds one event. So a second more is only accepted when all
    /// before the first have been dealt with. Metrics do nothing at the start of a validation.
    pub(super) fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}
