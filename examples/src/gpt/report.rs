//! The figures of a run, as a table and as JSON.

use std::path::Path;
use std::{fmt, io};

use burn_accum::MicroBatchFound;
use burn_zero::Estimate;
use serde::{Deserialize, Serialize};

use super::log::EpochLosses;
use crate::training::report::{self, mebibytes, table};

/// The content of `report.json`.
///
/// Losses, skipped steps and sample are the same on every run with the same options, text and
/// machine; speed and memory are measured.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Mean training loss of the last epoch, in nats a byte.
    pub train_loss: f64,
    /// Loss on the held-out text after the last step, in nats a byte.
    pub valid_loss: f64,
    /// Bytes of text trained on in a second, with validations and records; of this process only
    /// when it resumed a run.
    pub tokens_per_second: f64,
    /// The peak of this process's resident memory on the host; `None` where the system does not
    /// report it.
    pub peak_bytes: Option<u64>,
    /// Micro-batches that were skipped because a gradient was not finite.
    pub skipped_steps: u64,
    /// Operations that were computed once more for backward.
    pub replayed_operations: u64,
    /// Bytes of activations that came back from the host for backward.
    pub uploaded_bytes: u64,
    /// Windows in total: updates, had nothing been skipped.
    pub steps: usize,
    /// Updates that were taken.
    pub updates: u64,
    /// Sequences in a micro-batch of a rank.
    pub micro_batch: u64,
    /// Micro-batches of a rank in an update.
    pub window: u64,
    /// Sequences in an update, over all ranks.
    pub effective_batch: u64,
    /// How the micro-batch was found, if it was looked for.
    pub found: Option<MicroBatchFound>,
    /// `f32`, `bf16` or `f16`: what `--amp` chose.
    pub precision: String,
    /// Trained numbers.
    pub parameters: usize,
    /// Ranks.
    pub ranks: usize,
    /// ZeRO stage: what `--zero` chose.
    pub stage: u8,
    /// What a rank holds and sends at most, activations apart.
    pub estimate: Estimate,
    /// Losses of every epoch; of this process only when it resumed a run.
    pub epochs: Vec<EpochLosses>,
    /// Text that the model wrote.
    pub sample: String,
}

impl Report {
    /// Writes it as JSON.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, file: &Path) -> io::Result<()> {
        report::write(self, file)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let steps = self.steps as u64 * self.window;
        let (micro, window, ranks) = (self.micro_batch, self.window, self.ranks);
        let batch = format!("{} = {micro} x {window} x {ranks}", self.effective_batch);
        let rows = [
            ("training loss", format!("{:.4} nats/byte", self.train_loss)),
            (
                "validation loss",
                format!("{:.4} nats/byte", self.valid_loss),
            ),
            (
                "tokens per second",
                format!("{:.0}", self.tokens_per_second),
            ),
            ("peak resident memory", mebibytes(self.peak_bytes)),
            (
                "skipped micro-batches",
                format!("{} of {steps}", self.skipped_steps),
            ),
            ("effective batch", batch),
            ("updates", self.updates.to_string()),
            ("operations replayed", self.replayed_operations.to_string()),
        ];
        table(out, &rows)
    }
}
