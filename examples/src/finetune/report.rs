//! The figures of a run, as a table and as JSON.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::options::Options;
use crate::training::report::{self, mebibytes, table};

/// The content of `report.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The mean loss of the tokens of each update, before it, in nats a token.
    pub losses: Vec<f64>,
    /// The norm over all gradients of each update, before they were clipped.
    pub gradient_norms: Vec<f64>,
    /// What each update took: reading its sequences, forward, backward, optimizer.
    pub update_seconds: Vec<f64>,
    /// Loss on the held-out text before the training.
    pub valid_loss_before: f64,
    /// Loss on the held-out text after it.
    pub valid_loss: f64,
    /// Tokens read in a second of the training, without validations.
    pub tokens_per_second: f64,
    /// The peak of this process's resident memory on the host; `None` where the system does not
    /// report it.
    pub peak_bytes: Option<u64>,
    /// Micro-batches that were skipped because a gradient was not finite, which f16 may do.
    pub skipped_steps: u64,
    /// Updates.
    pub steps: usize,
    /// Sequences in a micro-batch of a rank.
    pub micro_batch: usize,
    /// Micro-batches of a rank in an update.
    pub window: usize,
    /// Ranks.
    pub ranks: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// `f32`, `bf16` or `f16`: what `--amp` chose.
    pub precision: String,
    /// ZeRO stage: what `--zero` chose.
    pub stage: u8,
    /// Trained numbers.
    pub parameters: usize,
    /// Sequences of the text to train on.
    pub sequences: usize,
}

impl Report {
    /// Writes `report.json`.
    ///
    /// # Errors
    ///
    /// The file cannot be written.
    pub fn write(&self, options: &Options) -> std::io::Result<()> {
        report::write(self, &options.output.join("report.json"))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = (self.valid_loss_before, self.valid_loss);
        let of_updates = |values: &[f64]| match values {
            [first, .., last] => format!("{first:.4} to {last:.4} nats/token"),
            _ => format!("{:.4} nats/token", values[0]),
        };
        let rows = [
            ("training loss", of_updates(&self.losses)),
            ("validation loss", of_updates(&[before, after])),
            (
                "tokens per second",
                format!("{:.0}", self.tokens_per_second),
            ),
            ("peak resident memory", mebibytes(self.peak_bytes)),
        ];
        table(out, &rows)
    }
}
