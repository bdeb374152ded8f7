//! One rank's training: Burn's loop over epochs, with the same decisions on all ranks.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::optim::GradientsParams;
use burn::tensor::{Device, backend::DeviceOps};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, EventProcessorTraining, Interrupter, Learner, LearnerEvent,
    LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainingBackend,
    TrainingItem, TrainingModel, ValidLoader,
};
use burn_backend::Device as _;

use super::checkpoints::Checkpoints;
use super::items::Items;
use super::split::check_parts;
use super::status::StepStatus;
use super::{Loaders, StrategyError, TrainItem, Uneven, ValidItem};
use crate::ZeroError;
use crate::group::{Agree, ProcessGroup};
use crate::optimizer::{RankContext, Statistics};

/// The state of a rank's training.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) device: Device<TrainingBackend<LC>>,
    pub(super) learner: Learner<LC>,
    /// This rank's part.
    pub(super) train: TrainLoader<LC>,
    pub(super) train_items: Items<TrainItem<LC>>,
    pub(super) valid_items: Items<ValidItem<LC>>,
    pub(super) job: Job<LC>,
    /// On rank 0 only.
    pub(super) rank_0: Option<Rank0<LC>>,
}

/// What is the same on all ranks.
pub(super) struct Job<LC: LearningComponentsTypes> {
    /// All of the data, of which each rank validates its share; this rank's part, if the processes have loaded parts.
    pub(super) valid: ValidLoader<LC>,
    pub(super) interrupter: Interrupter,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) first_epoch: usize,
    pub(super) last_epoch: usize,
    pub(super) uneven: Uneven,
    pub(super) loaders: Loaders,
}

impl<LC: LearningComponentsTypes> Clone for Job<LC> {
    fn clone(&self) -> Self {
        Self {
            valid: self.valid.clone(),
            interrupter: self.interrupter.clone(),
            store: self.store.clone(),
            ..*self
        }
    }
}

/// Rank 0's renderer, loggers, records and early stopping.
pub(super) struct Rank0<LC: LearningComponentsTypes> {
    pub(super) processor: SupervisedTrainingEventProcessor<LC>,
    pub(super) checkpoints: Option<Checkpoints<LC>>,
    pub(super) early_stopping: Option<Box<dyn CloneEarlyStoppingStrategy>>,
}

/// The result of a training.
pub(super) type Trained<LC> = (
    TrainingModel<LC>,
    Option<SupervisedTrainingEventProcessor<LC>>,
);

impl<LC: LearningComponentsTypes + 'static> Rank<LC> {
    /// # Errors
    ///
    /// Those of the strategy, of sharding and of the group.
    pub(super) fn run(mut self) -> Result<Trained<LC>, ZeroError> {
        self.train = self.train.to_device(&self.device);
        self.job.valid = self.job.valid.to_device(self.device.inner());
        let items = self.check()?;
        let context = RankContext::new(self.group.clone(), self.device.to_id());
        let on_thread = context.put_on_thread();
        context.prepare(core::any::type_name::<LC::Optimizer>(), || {
            self.learner.optimizer_step(GradientsParams::new());
        })?;
        let statistics = Statistics::of::<TrainingBackend<LC>, _>(&self.learner.model());

        for epoch in self.job.first_epoch..=self.job.last_epoch {
            let progress = Progress::new(epoch, self.job.last_epoch);
            self.train(&progress, items)?;
            // The same model is validated, recorded and returned.
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
        drop(on_thread);
        let model = self.learner.model();
        Ok((model, self.rank_0.map(|rank_0| rank_0.processor)))
    }

    /// Checks that the ranks' trainings agree. Returns the number of items of all ranks in an epoch.
    fn check(&self) -> Result<usize, ZeroError> {
        let Job {
            valid,
            first_epoch,
            last_epoch,
            uneven,
            loaders,
            ..
        } = &self.job;
        let (train, valid) = (self.train.num_items(), valid.num_items());
        let held = match loaders {
            Loaders::Whole => format!("{train} items to train on and {valid} to validate on"),
            Loaders::TrainSplit => format!("{valid} items to validate on"),
            Loaders::Split => "data in parts".to_owned(),
        };
        let text = format!(
            "epochs {first_epoch} to {last_epoch}, {held}, Uneven::{uneven:?}, Loaders::{loaders:?}"
        );
        self.group.agree_equal("training", &text)?;
        let ranks = self.group.world_size();
        if !loaders.split_training() {
            return Ok(train * ranks);
        }
        if *loaders == Loaders::Split && ranks > 1 && !self.valid_items.are_shared() {
            return Err(StrategyError::ItemsStay.into());
        }
        let parts = self.group.gather_i64("items to train on", train as i64)?;
        let parts: Vec<_> = parts.into_iter().map(|items| items as usize).collect();
        check_parts(&parts, *uneven)?;
        Ok(parts.iter().sum())
    }

    /// Whether any rank was interrupted; the reason goes to the log.
    fn is_interrupted(&self) -> Result<bool, ZeroError> {
        let interrupter = &self.job.interrupter;
        let status = StepStatus::default().interrupted(interrupter);
        let all = status.exchange(&*self.group, "end of the epoch")?;
        let interrupted = all.stop(interrupter);
        if interrupted {
            let reason = interrupter.get_message();
            let reason = reason.unwrap_or_else(|| "Reason unknown".to_owned());
            log::info!("Training interrupted: {reason}");
        }
        Ok(interrupted)
    }

    /// Lets rank 0 write a record, if one is due.
    fn save(&mut self, epoch: usize, context: &RankContext) -> Result<(), ZeroError> {
        let learner = &mut self.learner;
        match &self.rank_0 {
            Some(rank_0) => context.lead_record(|| {
                if let Some(checkpoints) = &rank_0.checkpoints {
                    checkpoints.write(learner, epoch, &self.job.store);
                }
            }),
            None => context.take_part(|| learner.optimizer_step(GradientsParams::new())),
        }
    }

    /// Whether to stop early, as rank 0 decides.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, ZeroError> {
        let rank_0 = self.rank_0.as_mut();
        let early_stopping = rank_0.and_then(|rank_0| rank_0.early_stopping.as_mut());
        let store = &self.job.store;
        let own = early_stopping.is_some_and(|stopping| stopping.should_stop(epoch, store));
        self.group.agree_any("early stopping", own)
    }
}

impl<LC: LearningComponentsTypes> Rank0<LC> {
    pub(super) fn show_train(&mut self, item: TrainingItem<TrainItem<LC>>) {
        self.processor
            .process_train(LearnerEvent::ProcessedItem(item));
    }

    pub(super) fn show_valid(&mut self, item: TrainingItem<ValidItem<LC>>) {
        self.processor
            .process_valid(LearnerEvent::ProcessedItem(item));
    }

    /// Waits until the metrics of all items are logged, because early stopping and the choice of records read them there. Burn may
    /// decide without the last ones.
    ///
    /// The channel to the thread that computes metrics holds one event. So after two further events are accepted, all
    /// earlier ones have been processed. The events are starts of a validation, which metrics ignore.
    pub(super) fn settle_metrics(&mut self) {
        for _ in 0..2 {
            self.processor.process_valid(LearnerEvent::Start);
        }
    }
}
