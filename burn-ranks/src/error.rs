//! The errors of this crate, with the values.

use thiserror::Error;

use crate::GroupFault;

/// Errors of groups and of shards.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum RanksError {
    /// The group is lost: a rank hangs, left, panicked, aborted, or made another call.
    #[error(transparent)]
    Group(#[from] GroupFault),

    /// A buffer that cannot be cut as the call requires. It is found before anything is sent.
    #[error(transparent)]
    BufferLength(#[from] BufferLength),

    /// A setting that cannot work, such as a group of no ranks.
    #[error(transparent)]
    InvalidSetting(#[from] InvalidSetting),

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

    /// A group cannot be started in this process: MPI, or a thread.
    #[error("{what}: {reason}")]
    Start {
        /// What cannot be started.
        what: String,
        /// Why, and what to do.
        reason: String,
    },
}

/// A buffer of another length than a call needs.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{call}: the buffer has {elements} elements, but {expected}")]
pub struct BufferLength {
    /// The call, with its label.
    pub call: String,
    /// Elements of the buffer.
    pub elements: usize,
    /// What the call needs.
    pub expected: String,
}

/// A setting whose value cannot work.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{setting} = {value}, but it must be {expected}")]
pub struct InvalidSetting {
    /// The setting.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// The valid values.
    pub expected: &'static str,
}

impl InvalidSetting {
    /// Checks a setting.
    ///
    /// ```
    /// use burn_ranks::InvalidSetting;
    ///
    /// let error = InvalidSetting::unless(0 > 1, "world_size", 0, "at least 1").unwrap_err();
    /// assert_eq!(error.to_string(), "world_size = 0, but it must be at least 1");
    /// ```
    ///
    /// # Errors
    ///
    /// Itself, unless the condition `holds`.
    pub fn unless(
        holds: bool,
        setting: &'static str,
        value: impl ToString,
        expected: &'static str,
    ) -> Result<(), Self> {
        if holds {
            return Ok(());
        }
        let value = value.to_string();
        Err(Self {
            setting,
            value,
            expected,
        })
    }
}
