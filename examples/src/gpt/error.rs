//! What can go wrong before and during a training.

use std::io;
use std::path::PathBuf;

use super::accumulation::NotFound;
use crate::backend::BackendMissing;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum GptError {
    /// Options that contradict each other.
    #[error("{0}")]
    Options(String),

    /// A configuration that cannot be, or that is not for so many ranks.
    #[error("{place}: {source}")]
    Config {
        /// The file, and the options that were put together with it.
        place: String,
        /// What is wrong with it.
        source: burn_zero::ConfigError,
    },

    /// An option that says something else than the file of `--config`.
    #[error("{option}, but {} has {says}: leave one of them out", path.display())]
    Contradiction {
        /// The option and its value.
        option: String,
        /// The file.
        path: PathBuf,
        /// What it says.
        says: String,
    },

    /// The ranks cannot train together.
    #[error(transparent)]
    Ranks(#[from] burn_zero::ZeroError),

    /// The optimizer's state cannot be kept on the host.
    #[error(transparent)]
    Offload(#[from] burn_zero::OffloadError),

    /// A file or directory that cannot be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// No text to train on.
    #[error("there is no text in {place}")]
    NoText {
        /// Where it was looked for.
        place: String,
    },

    /// The text does not fill one sequence of each part.
    #[error(
        "the text is too short: {bytes} bytes leave {part_bytes} for {part}, and --context {context} needs {}; \
         give a longer --text or a smaller --context", context + 1
    )]
    TextTooShort {
        /// Length of the whole text.
        bytes: usize,
        /// `training` or `validation`.
        part: &'static str,
        /// Length of that part.
        part_bytes: usize,
        /// The context asked for.
        context: usize,
    },

    /// The backend is not compiled in.
    #[error(transparent)]
    BackendMissing(#[from] BackendMissing),

    /// The device cannot compute in the precision, or the training cannot go on in it.
    #[error(transparent)]
    Precision(#[from] burn_amp::AmpError),

    /// No micro-batch keeps below the memory limit, or none can be looked for.
    #[error("no micro-batch for --effective-batch: {0}")]
    MicroBatch(#[from] NotFound),

    /// The backend does not tell how much memory its device has.
    #[error(
        "the {backend} backend does not tell how much memory its device has: give --memory-limit"
    )]
    MemoryUnknown {
        /// Its name.
        backend: &'static str,
    },

    /// `--resume` without a record.
    #[error("nothing to resume: there is no complete record in {}; run without --resume first", path.display())]
    NoRecord {
        /// The directory of the records.
        path: PathBuf,
    },

    /// `--resume` of a training that has ended.
    #[error("nothing to resume: all {steps} steps are in {}; see its report.json", path.display())]
    AlreadyComplete {
        /// The directory of the run.
        path: PathBuf,
        /// Its length.
        steps: usize,
    },

    /// `--resume` with other options than the run was started with.
    #[error("cannot resume {} with other options than it was started with: {differences}", path.display())]
    OptionsChanged {
        /// The directory of the run.
        path: PathBuf,
        /// Each option with both values.
        differences: String,
    },

    /// The training ended before its last step.
    #[error(
        "the training stopped, with {steps} steps recorded: {reason}; --resume goes on from there"
    )]
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
        matches!(
            self,
            Self::Options(_) | Self::Config { .. } | Self::Contradiction { .. }
        )
    }

    /// An [`Io`](Self::Io) error about this path.
    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
