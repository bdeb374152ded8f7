//! What ranks exchange after each step.

use burn::train::Interrupter;
use serde::{Deserialize, Serialize};

/// What a rank tells the others after a step.
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
