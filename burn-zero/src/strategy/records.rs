//! Records of what a Learner hides: its optimizer answers where it is asked for its record.

use std::sync::Arc;

use burn::record::Record;
use burn::tensor::{Device, backend::Backend};
use burn::train::checkpoint::{
    AsyncCheckpointer, Checkpointer, CheckpointerError, CheckpointingAction, CheckpointingStrategy,
};
use burn::train::metric::store::EventStoreClient;
use burn::train::{
    Learner, LearnerModelRecord, LearnerOptimizerRecord, LearnerSchedulerRecord,
    LearningCheckpointer, LearningComponentsTypes,
};
use parking_lot::Mutex;

/// Makes the learner's records; whoever is in its optimizer takes part.
pub(super) fn ask<LC: LearningComponentsTypes>(learner: &Learner<LC>, store: &EventStoreClient) {
    Records::of(learner, store);
}

/// A learner's records, in memory.
pub(super) struct Records<LC: LearningComponentsTypes> {
    model: Held<LearnerModelRecord<LC>>,
    optimizer: Held<LearnerOptimizerRecord<LC>>,
    scheduler: Held<LearnerSchedulerRecord<LC>>,
}

/// What a checkpointer was given.
type Held<R> = Arc<Mutex<Option<R>>>;

impl<LC: LearningComponentsTypes> Records<LC> {
    pub(super) fn of(learner: &Learner<LC>, store: &EventStoreClient) -> Self {
        let records = Self {
            model: Held::default(),
            optimizer: Held::default(),
            scheduler: Held::default(),
        };
        let mut checkpointer = LearningCheckpointer::<LC>::new(
            AsyncCheckpointer::new(Keep(records.model.clone())),
            AsyncCheckpointer::new(Keep(records.optimizer.clone())),
            AsyncCheckpointer::new(Keep(records.scheduler.clone())),
            Box::new(Always),
        );
        checkpointer.checkpoint(learner, 0, store);
        drop(checkpointer); // when its threads have ended, the records are there
        records
    }

    /// Gives them to another learner.
    pub(super) fn load_into(self, learner: &mut Learner<LC>) {
        if let Some(record) = self.model.lock().take() {
            learner.load_model(record);
        }
        if let Some(record) = self.optimizer.lock().take() {
            learner.load_optim(record);
        }
        if let Some(record) = self.scheduler.lock().take() {
            learner.load_scheduler(record);
        }
    }
}

struct Always;

impl CheckpointingStrategy for Always {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

struct Keep<R>(Held<R>);

impl<R: Record<B>, B: Backend> Checkpointer<R, B> for Keep<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        *self.0.lock() = Some(record);
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize, _: &Device<B>) -> Result<R, CheckpointerError> {
        let record = self.0.lock().take();
        record.ok_or_else(|| CheckpointerError::Unknown("nothing was saved".to_owned()))
    }
}
