//! The errors of this crate, with the values.

use thiserror::Error;

use crate::ZeroOptimizerError;
use crate::group::GroupFault;

/// Errors of ZeRO.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// The group is lost: a rank hangs, left, panicked, aborted, or made another call.
    #[error(transparent)]
    Group(#[from] GroupFault),

    /// A model, an optimizer or a backend that cannot be sharded with these settings.
    #[error(transparent)]
    Optimizer(#[from] ZeroOptimizerError),

    /// A Learner, or data, that [`ZeroStrategy`](crate::ZeroStrategy) cannot train with these
    /// ranks: why, and what to do instead.
    #[error("{0}")]
    Strategy(String),

    /// A buffer that cannot be cut as the call requires. It is found before anything is sent.
    #[error("{call}: the buffer has {elements} elements, but {expected}")]
    BufferLength {
        /// The call, with its label.
        call: String,
        /// Elements of the buffer.
        elements: usize,
        /// What the call needs.
        expected: String,
    },

    /// Ranks hold different values where all must hold the same.
    #[error(
        "{label}: rank {rank} has `{value}`, but rank {peer} has `{peer_value}`; all ranks must have the same"
    )]
    Disagreement {
        /// What was compared.
        label: String,
        /// This rank, or for a union of all ranks' state the first that has a part of it.
        rank: usize,
        /// That rank's value.
        value: String,
        /// The first rank whose value differs.
        peer: usize,
        /// That rank's value.
        peer_value: String,
    },

    /// A setting that cannot work, such as a group of no ranks.
    #[error("{setting} = {value}, but it must be {expected}")]
    InvalidSetting {
        /// The setting.
        setting: &'static str,
        /// Its value.
        value: String,
        /// The valid values.
        expected: &'static str,
    },

    /// A group cannot be started in this process: MPI, or a thread.
    #[error("{what}: {reason}")]
    Start {
        /// What cannot be started.
        what: String,
        /// Why, and what to do.
        reason: String,
    },

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

impl ZeroError {
    /// # Errors
    ///
    /// [`InvalidSetting`](Self::InvalidSetting) unless the condition `holds`.
    pub(crate) fn require(
        holds: bool,
        setting: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> Result<(), Self> {
        if holds {
            return Ok(());
        }
        let value = value.to_string();
        Err(Self::InvalidSetting {
            setting,
            value,
            expected,
        })
    }
}
