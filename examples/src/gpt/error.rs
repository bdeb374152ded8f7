//! What can go wrong before and during a training.

use std::io;

use crate::backend::BackendMissing;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum GptError {
    /// Options, or a file of `--config`, that cannot be, alone or together or for this text, device
    /// or number of ranks: the values, and what would be right.
    #[error("{0}")]
    Options(String),

    /// The ranks cannot train together.
    #[error(transparent)]
    Ranks(#[from] burn_ranks::RanksError),

    /// ZeRO refuses the model, the optimizer or the Learner, or a rank has failed.
    #[error(transparent)]
    Zero(#[from] burn_zero::ZeroError),

    /// A file or directory that cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),

    /// The backend is not compiled in, or the machine lacks what it needs.
    #[error(transparent)]
    BackendMissing(#[from] BackendMissing),

    /// The device cannot compute in the precision, or the training cannot go on in it.
    #[error(transparent)]
    Precision(#[from] burn_amp::AmpError),

    /// No micro-batch keeps below the memory limit, or none can be looked for.
    #[error("no micro-batch for --effective-batch: {0}")]
    MicroBatch(#[from] burn_accum::FindError),

    /// `--resume` without a record, after the end, or with other settings: each with both values.
    #[error("nothing to resume: {0}")]
    Resume(String),

    /// The training ended before its last step.
    #[error("stopped, with {steps} steps recorded: {reason}{}", if *steps > 0 { "; --resume goes on from there" } else { "" })]
    Stopped {
        /// Steps before the last record.
        steps: usize,
        /// Who stopped it.
        reason: String,
    },
}

impl GptError {
    /// Whether the command itself is wrong, rather than what came of it.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Options(_))
    }
}
