//! The errors of this crate, with the values.

use burn_ranks::{BufferLength, InvalidSetting, RanksError};
use thiserror::Error;

use crate::ZeroOptimizerError;

/// Errors of ZeRO.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// The group of ranks is lost, cannot start, or its ranks disagree.
    #[error(transparent)]
    Ranks(#[from] RanksError),

    /// A model, an optimizer or a backend that cannot be sharded with these settings.
    #[error(transparent)]
    Optimizer(#[from] ZeroOptimizerError),

    /// A Learner, or data, that [`ZeroStrategy`](crate::ZeroStrategy) cannot train with these
    /// ranks: why, and what to do instead.
    #[error("{0}")]
    Strategy(String),

    /// A setting that cannot work, of a [`HostAdamWConfig`](crate::HostAdamWConfig) for example.
    #[error(transparent)]
    InvalidSetting(#[from] InvalidSetting),

    /// A buffer of another length than a [`HostAdamW`](crate::HostAdamW) has.
    #[error(transparent)]
    BufferLength(#[from] BufferLength),

    /// A tensor that cannot be read from its device.
    #[error("{what} cannot be read from its device: {reason}")]
    Read {
        /// The tensor, such as `the gradient of blocks.0.weight`.
        what: String,
        /// The backend's reason.
        reason: String,
    },

    /// The host has no memory for a buffer.
    #[error("{what}: no host memory for a buffer of {bytes} bytes: {reason}")]
    OutOfMemory {
        /// What needs the buffer.
        what: String,
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        reason: String,
    },
}
