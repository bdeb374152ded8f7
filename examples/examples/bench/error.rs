//! What can go wrong around a benchmark.

use std::io;
use std::path::{Path, PathBuf};

use examples::backend::BackendMissing;

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// Options that contradict each other.
    #[error("{0}")]
    Options(String),

    /// The backend is not compiled in, or the machine lacks what it needs.
    #[error(transparent)]
    BackendMissing(#[from] BackendMissing),

    /// The device cannot compute in a setting's precision.
    #[error(transparent)]
    Precision(#[from] burn_amp::AmpError),

    /// A file that cannot be read or written, or a process that cannot be started.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },

    /// A file that holds something else than the results of this benchmark or of torch_gpt.py.
    #[error("{} is neither of this benchmark nor of torch_gpt.py: {source}", path.display())]
    NotResults {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: serde_json::Error,
    },

    /// The chart cannot be drawn.
    #[error("cannot draw {}: {reason}", path.display())]
    Plot {
        /// The file.
        path: PathBuf,
        /// What plotters said.
        reason: String,
    },

    /// No setting could be measured.
    #[error("no setting could be measured\n{0}")]
    NothingMeasured(
        /// The table, with a reason for each.
        String,
    ),
}

impl BenchError {
    /// An [`Io`](Self::Io) error about this path.
    pub(super) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::Io {
            action,
            path: path.to_owned(),
            source,
        }
    }
}
