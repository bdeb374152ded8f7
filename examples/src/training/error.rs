//! What can go wrong before and during a training.

use std::io;
use std::path::PathBuf;

use crate::backend::BackendMissing;
use crate::llm::LlmError;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum TrainingError {
    /// Options, or a file of `--config`, that cannot be, alone or together or for this text, device
    /// or number of ranks: the values, and what would be right.
    #[error("{0}")]
    Options(String),

    /// The ranks cannot train together.
    #[error(transparent)]
    Ranks(#[from] burn_ranks::RanksError),

    /// The settings cannot be an update, the update refuses the model, or it cannot go on.
    #[error(transparent)]
    Update(burn_update::UpdateError),

    /// The settings of the windows.
    #[error(transparent)]
    Windows(#[from] burn_accum::AccumError),

    /// The model's blocks cannot have scopes of their own.
    #[error("--checkpoint units: {0}")]
    Units(#[from] burn_checkpoint::RematError),

    /// A file or directory that cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),

    /// The backend is not compiled in, or the machine lacks what it needs.
    #[error(transparent)]
    BackendMissing(#[from] BackendMissing),

    /// A model's directory cannot be read or written.
    #[error(transparent)]
    Model(#[from] LlmError),

    /// A text or a tokenizer that cannot be used.
    #[error("{path}: {reason}", path = path.display())]
    Text {
        /// The file.
        path: PathBuf,
        /// What is wrong, and what to do.
        reason: String,
    },

    /// A loss or a gradient is not finite.
    #[error(
        "update {update} has a loss of {loss} and a gradient norm of {norm}: the training has diverged; give a smaller --lr or --clip"
    )]
    Diverged {
        /// Counted from 1.
        update: usize,
        /// Of the update's tokens.
        loss: f64,
        /// Of all gradients.
        norm: f64,
    },

    /// The device cannot compute in the precision, or the training cannot go on in it.
    #[error(transparent)]
    Precision(#[from] burn_amp::AmpError),

    /// No micro-batch keeps below the memory limit, or none can be looked for.
    #[error("no micro-batch for --effective-batch: {0}")]
    MicroBatch(#[source] burn_accum::AccumError),

    /// A record cannot be written, or not be read, or is of another training.
    #[error(transparent)]
    Record(burn_zero::ZeroError),

    /// `--resume` without a record, after the end, or with other settings: each with both values.
    #[error("cannot resume: {0}")]
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

/// Ranks that fail do so as ranks, whoever notices it.
impl From<burn_update::UpdateError> for TrainingError {
    fn from(error: burn_update::UpdateError) -> Self {
        match error {
            burn_update::UpdateError::Ranks(error) => Self::Ranks(error),
            other => Self::Update(other),
        }
    }
}

impl From<burn_zero::ZeroError> for TrainingError {
    fn from(error: burn_zero::ZeroError) -> Self {
        match error {
            burn_zero::ZeroError::Ranks(error) => Self::Ranks(error),
            burn_zero::ZeroError::Record(_) => Self::Record(error),
            other => burn_update::UpdateError::from(other).into(),
        }
    }
}

impl TrainingError {
    /// Whether the command itself is wrong, rather than what came of it.
    pub fn is_usage(&self) -> bool {
        matches!(self, Self::Options(_))
    }
}
