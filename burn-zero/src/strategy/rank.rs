//! One rank's training: Burn's loop over epochs, with the same decisions on all ranks.

use std::sync::Arc;

use burn::data::dataloader::Progress;
use burn::optim::GradientsParams;
use burn::tensor::{Device, backend::DeviceOps};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    CloneEarlyStoppingStrategy, Interrupter, Learner, LearningCheckpointer,
    LearningComponentsTypes, SupervisedTrainingEventProcessor, TrainLoader, TrainingBackend,
    TrainingModel, ValidLoader,
};
use burn_backend::Device as _;
use burn_ranks::{ProcessGroup, finish_first};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::items::Items;
use super::{TrainItem, TrainMetrics, ValidItem};
use crate::ZeroError;
use crate::optimizer::{Ask, RankContext, Statistics};

/// The state of a rank's training.
pub(super) struct Rank<LC: LearningComponentsTypes> {
    pub(super) group: Arc<dyn ProcessGroup>,
    pub(super) device: Device<TrainingBackend<LC>>,
    pub(super) learner: Learner<LC>,
    /// This rank's part of the training data.
    pub(super) train: TrainLoader<LC>,
    /// All of the data, of which each rank validates its share.
    pub(super) valid: ValidLoader<LC>,
    pub(super) train_items: Items<TrainItem<LC>>,
    pub(super) valid_items: Items<ValidItem<LC>>,
    pub(super) run: Run,
    /// On rank 0 only.
    pub(super) rank_0: Option<Rank0<LC>>,
}

/// What is the same on all ranks.
#[derive(Clone)]
pub(super) struct Run {
    pub(super) interrupter: Interrupter,
    pub(super) store: Arc<EventStoreClient>,
    pub(super) first_epoch: usize,
    pub(super) last_epoch: usize,
    /// Of the training data, as a text to compare; empty for a loader of Burn's.
    pub(super) order: Arc<str>,
    pub(super) train_metrics: TrainMetrics,
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
    #[expect(clippy::boxed_local, reason = "a model is large by value")]
    pub(super) fn run(mut self: Box<Self>) -> Result<Trained<LC>, ZeroError> {
        self.train = self.train.to_device(&self.device);
        self.valid = self.valid.to_device(self.device.inner());
        let items = self.check()?;
        let context = RankContext::new(self.group.clone(), self.device.to_id());
        let train = || self.train_all(&context, items);
        context.on_thread(train)?;
        let model = self.learner.model();
        Ok((model, self.rank_0.map(|rank_0| rank_0.processor)))
    }

    /// Prepares the model and runs all epochs.
    fn train_all(&mut self, context: &RankContext, items: usize) -> Result<(), ZeroError> {
        context.prepare(core::any::type_name::<LC::Optimizer>(), || {
            self.learner.optimizer_step(GradientsParams::new());
        })?;
        let statistics = Statistics::of::<TrainingBackend<LC>, _>(&self.learner.model());

        for epoch in self.run.first_epoch..=self.run.last_epoch {
            let progress = Progress::new(epoch, self.run.last_epoch);
            self.train(&progress, items)?;
            // The same model is validated, recorded and returned.
            let model = self.learner.model();
            statistics.share::<TrainingBackend<LC>, _>(&model, &*self.group)?;
            let status = StepStatus::default().interrupted(&self.run.interrupter);
            let all = self.exchange(status, "end of the epoch")?;
            if self.is_interrupted(&all) {
                let reason = self.run.interrupter.get_message();
                let reason = reason.as_deref().unwrap_or("Reason unknown");
                log::info!("Training interrupted: {reason}");
                break;
            }
            self.validate(&progress, context.gathers_units())?;
            self.save(epoch, context)?;
            if self.stops_early(epoch)? {
                break;
            }
        }
        let learner = &mut self.learner;
        let step = || learner.optimizer_step(GradientsParams::new());
        context.ask(Ask::Whole, step).map(drop)
    }

    /// Checks that the ranks' trainings agree. Returns the number of items of all ranks in an
    /// epoch.
    fn check(&self) -> Result<usize, ZeroError> {
        let (train, valid) = (self.train.num_items(), self.valid.num_items());
        let text = format!(
            "epochs {} to {}, {train} items to train on{} and {valid} to validate on",
            self.run.first_epoch, self.run.last_epoch, self.run.order
        );
        self.group.agree_equal("training", &text)?;
        Ok(train * self.group.world_size())
    }

    /// The statuses of all ranks, in their order. One collective.
    ///
    /// # Errors
    ///
    /// Those of the group, also for a label that differs.
    pub(super) fn exchange(
        &self,
        status: StepStatus,
        label: &str,
    ) -> Result<Vec<StepStatus>, ZeroError> {
        let group = &self.group;
        if group.world_size() == 1 {
            return Ok(vec![status]);
        }
        let bytes = serde_json::to_vec(&status).expect("a status has only plain fields");
        let all = group.gather_bytes(label, bytes)?;
        let all = all.iter().map(|bytes| serde_json::from_slice(bytes));
        let all: Result<_, _> = all.collect();
        Ok(all.expect("ranks run the same program"))
    }

    /// Whether any rank was interrupted. If so, this rank is interrupted too, with the same reason.
    pub(super) fn is_interrupted(&self, all: &[StepStatus]) -> bool {
        let reason = all.iter().find_map(|status| status.interrupted.as_deref());
        if let (Some(reason), false) = (reason, self.run.interrupter.should_stop()) {
            let reason = Some(reason).filter(|reason| !reason.is_empty());
            self.run.interrupter.stop(reason);
        }
        reason.is_some()
    }

    /// Lets rank 0 write a record, if it has a checkpointer, whose strategy decides whether one is
    /// due.
    fn save(&mut self, epoch: usize, context: &RankContext) -> Result<(), ZeroError> {
        let (learner, store) = (&mut self.learner, &self.run.store);
        let own = self.rank_0.as_ref();
        let own = own.and_then(|rank_0| rank_0.checkpoints.as_ref());
        if !self
            .group
            .agree_any("whether there are records", own.is_some())?
        {
            return Ok(());
        }
        let step = |learner: &mut Learner<LC>| learner.optimizer_step(GradientsParams::new());
        context.ask(Ask::Whole, || step(learner))?;
        context.ask(Ask::Record, || step(learner))?;
        // The checkpointer's background thread reads the model that it was given here.
        context.write_record(own.map(|own| || own.write(learner, epoch, store)))?;
        context.ask(Ask::Sharded, || step(learner)).map(drop)
    }

    /// Whether to stop early, as rank 0 decides.
    fn stops_early(&mut self, epoch: usize) -> Result<bool, ZeroError> {
        let rank_0 = self.rank_0.as_mut();
        let early_stopping = rank_0.and_then(|rank_0| rank_0.early_stopping.as_mut());
        let store = &self.run.store;
        let own = early_stopping.is_some_and(|stopping| stopping.should_stop(epoch, store));
        Ok(self.group.agree_any("early stopping", own)?)
    }
}

/// The step status of one rank: what ranks exchange after each step.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct StepStatus {
    /// Whether the rank has a batch for the next step.
    pub(super) has_batch: bool,
    /// Whether the last step has an item for rank 0.
    pub(super) has_item: bool,
    /// Items of all ranks' data that are done after the last step.
    pub(super) done: usize,
    /// If the rank is interrupted, the reason, or an empty text.
    pub(super) interrupted: Option<String>,
}

impl StepStatus {
    /// Notes whether the rank is interrupted.
    pub(super) fn interrupted(mut self, interrupter: &Interrupter) -> Self {
        let reason = || interrupter.get_message().unwrap_or_default();
        self.interrupted = interrupter.should_stop().then(reason);
        self
    }
}

/// Burn's checkpointer, which writes records in the background. Before the process ends because of
/// a fault, files that are being written are finished, so that none is cut off and no complete one
/// is deleted for an incomplete one.
pub(super) struct Checkpoints<LC: LearningComponentsTypes> {
    checkpointer: Arc<Mutex<Option<LearningCheckpointer<LC>>>>,
    /// Called before the process ends, for as long as this is alive.
    finish: Arc<dyn Fn() + Send + Sync>,
}

impl<LC: LearningComponentsTypes + 'static> Checkpoints<LC> {
    pub(super) fn new(checkpointer: LearningCheckpointer<LC>) -> Self {
        let checkpointer = Arc::new(Mutex::new(Some(checkpointer)));
        let held = checkpointer.clone();
        // Dropping the checkpointer waits for its writes. The lock waits for a running `write`.
        let finish: Arc<dyn Fn() + Send + Sync> = Arc::new(move || drop(held.lock().take()));
        finish_first(&finish);
        Self {
            checkpointer,
            finish,
        }
    }

    /// Writes the records of an epoch, if the user's strategy wants them, and deletes old ones.
    /// Returns while they are written.
    pub(super) fn write(&self, learner: &Learner<LC>, epoch: usize, store: &EventStoreClient) {
        if let Some(checkpointer) = &mut *self.checkpointer.lock() {
            checkpointer.checkpoint(learner, epoch, store);
        }
    }
}

impl<LC: LearningComponentsTypes> Drop for Checkpoints<LC> {
    fn drop(&mut self) {
        (self.finish)();
    }
}
