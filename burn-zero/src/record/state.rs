//! The small state beside the tensors.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What training needs besides tensors, as JSON.
///
/// All but `generator` is the same on all ranks, and [`save_sharded`](super::save_sharded) refuses it if not. Numbers come
/// back bit for bit. JSON has no NaN and no infinity: `serde_json` makes `null` of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Updates taken when the record was saved; names the record.
    pub step: u64,
    /// State of the loss scaler.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub scaler: Value,
    /// State of the learning-rate scheduler.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub scheduler: Value,
    /// All of the optimizer's state that is no tensor, such as step counts: of each rank what it has, together the whole. The
    /// [`Recorder`](crate::Recorder) fills it in.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub optimizer: Value,
    /// Whatever else: position in the data, configuration, metrics.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub user: Map<String, Value>,
    /// State of this rank's random generators: what [`with_generator`](Self::with_generator) takes, or the caller's own. Each rank
    /// has its own, so it comes back only at the same world size. Nobody fills it in unasked.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub generator: Value,
}

impl TrainingState {
    /// State after `step` updates, with nothing else.
    pub fn at_step(step: u64) -> Self {
        Self {
            step,
            ..Self::default()
        }
    }

    /// What this rank has alone, taken out of what all have.
    pub(super) fn split(mut self) -> (Self, Value) {
        let generator = self.generator.take();
        (self, generator)
    }
}
