//! Burn's checkpointer, which writes in the background, made safe for a process that ends because of a fault.

use std::sync::Arc;

use burn::train::metric::store::EventStoreClient;
use burn::train::{Learner, LearningCheckpointer, LearningComponentsTypes};
use parking_lot::Mutex;

use crate::group::unfinished;

/// Writes the records. Before the process ends because of a fault, files that are being written are finished, so that none is cut off
/// and no complete one is deleted for an incomplete one.
pub(super) struct Checkpoints<LC: LearningComponentsTypes> {
    checkpointer: Arc<Mutex<Option<LearningCheckpointer<LC>>>>,
    /// Registered for as long as it lives.
    finish: Arc<dyn Fn() + Send + Sync>,
}

impl<LC: LearningComponentsTypes + 'static> Checkpoints<LC> {
    pub(super) fn new(checkpointer: LearningCheckpointer<LC>) -> Self {
        let checkpointer = Arc::new(Mutex::new(Some(checkpointer)));
        let held = checkpointer.clone();
        // Dropping the checkpointer waits for its writes. The lock waits for a running `write`.
        let finish: Arc<dyn Fn() + Send + Sync> = Arc::new(move || drop(held.lock().take()));
        unfinished::register(&finish);
        Self {
            checkpointer,
            finish,
        }
    }

    /// Writes the records of an epoch, if the user's strategy wants them, and deletes old ones. Returns while they are written.
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
