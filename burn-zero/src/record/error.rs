//! The errors of records, with the values.

use std::io;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::Arc;

use burn_ranks::RanksError;
use thiserror::Error;

use crate::{ShardingError, ZeroError};

/// Errors of sharded records.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// An operation of the file system failed.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The file system's reason.
        source: io::Error,
    },
    /// The directory has no complete record.
    #[error("no complete record{} in {} ({partial} not finished)", of_step(.step), .dir.display())]
    NoRecord {
        /// The directory of records.
        dir: PathBuf,
        /// The step that was asked for, `None` for the last.
        step: Option<u64>,
        /// Number of unfinished records.
        partial: usize,
    },
    /// A file of the record is missing, is not what was written, or is of another record or version
    /// of the format.
    #[error("the record is torn: {} {reason}", .path.display())]
    Torn {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the lengths, checksums or versions.
        reason: String,
    },
    /// The record is of another model: it lacks a wanted tensor, has it in another type or shape,
    /// or has a further tensor.
    #[error("{} {reason}", .path.display())]
    OtherModel {
        /// The record.
        path: PathBuf,
        /// What it has and what is wanted, with the tensor's name.
        reason: String,
    },

    /// An entry that cannot be saved or loaded: its range or length is impossible, its elements are
    /// on no rank or on two, or the caller's code could not provide or receive its bytes.
    #[error("`{name}` {reason}")]
    Entry {
        /// The entry.
        name: String,
        /// What is wrong.
        reason: String,
    },
    /// The ranks save different state, or describe a tensor differently.
    #[error("{difference}: all ranks save and load the same record")]
    RanksDiffer {
        /// What differs, with two ranks and their values.
        difference: String,
    },

    /// State of a training that cannot be split for a record, or joined from one.
    #[error(transparent)]
    State(#[from] ShardingError),
    /// State of a scheduler that cannot be saved, or that is of another scheduler.
    #[error("state of the scheduler: {reason}")]
    Scheduler {
        /// What is wrong, and with which entry.
        reason: String,
    },
    /// Another rank failed, so all stop.
    #[error("rank {rank} failed: {message}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// The group of ranks is lost: a rank hangs, left, panicked or made another call.
    #[error(transparent)]
    Group(ZeroError),
}

/// Errors of the file system have no equality of their own: two of the same kind are equal if they
/// say the same.
impl PartialEq for RecordError {
    fn eq(&self, other: &Self) -> bool {
        discriminant(self) == discriminant(other) && self.to_string() == other.to_string()
    }
}

impl RecordError {
    /// Whether the file system has no such file.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

impl From<RanksError> for RecordError {
    fn from(error: RanksError) -> Self {
        Self::Group(error.into())
    }
}

impl From<ZeroError> for RecordError {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Sharding(error) => Self::State(error),
            ZeroError::Record(error) => {
                let in_group = |error| Self::Group(ZeroError::Record(error));
                Arc::try_unwrap(error).unwrap_or_else(in_group)
            }
            error => Self::Group(error),
        }
    }
}

fn of_step(step: &Option<u64>) -> String {
    step.map_or_else(String::new, |step| format!(" of step {step}"))
}
