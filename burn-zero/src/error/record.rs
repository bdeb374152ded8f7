//! The faults of records, with the values.

use std::io;
use std::mem::discriminant;
use std::path::PathBuf;
use std::sync::Arc;

use thiserror::Error;

/// Why a sharded record cannot be saved or loaded.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum RecordFault {
    /// An operation of the file system failed.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The file system's reason.
        source: Arc<io::Error>,
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
}

/// Errors of the file system have no equality of their own: two of the same kind are equal if they
/// say the same.
impl PartialEq for RecordFault {
    fn eq(&self, other: &Self) -> bool {
        discriminant(self) == discriminant(other) && self.to_string() == other.to_string()
    }
}

impl RecordFault {
    /// Whether the file system has no such file.
    pub(crate) fn is_not_found(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

fn of_step(step: &Option<u64>) -> String {
    step.map_or_else(String::new, |step| format!(" of step {step}"))
}
