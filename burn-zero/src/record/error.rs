//! What can go wrong with a record, with the values.

use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use thiserror::Error;

use crate::{ZeroError, ZeroOptimizerError};

/// Errors of sharded records.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum RecordError {
    /// The file system refused.
    #[error("cannot {action} {}: {source}", .path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The file system's reason.
        source: io::Error,
    },
    /// Another process is saving into the directory.
    #[error("another job is saving records into {}: give each job a directory of its own", .dir.display())]
    Busy {
        /// The directory of records.
        dir: PathBuf,
    },
    /// A rank does not see the directory that rank 0 made.
    #[error(
        "rank {rank} does not see {}, which rank 0 made: records go to a file system that all ranks share", .path.display()
    )]
    NotShared {
        /// The rank.
        rank: usize,
        /// The directory.
        path: PathBuf,
    },

    /// No complete record is there.
    #[error("no complete record{} in {}{}", of_step(.step), .dir.display(), unfinished(*.partial))]
    NoRecord {
        /// The directory of records.
        dir: PathBuf,
        /// The step that was asked for, `None` for the last.
        step: Option<u64>,
        /// How many records there are that their writers did not finish.
        partial: usize,
    },
    /// A manifest that cannot be read as one.
    #[error("{} is not the manifest of a sharded record: {reason}", .path.display())]
    NotAManifest {
        /// The manifest.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A manifest whose tensors have elements on no rank or on two, or that reach beyond what a machine can address.
    #[error("{} contradicts itself: {source}", .path.display())]
    Inconsistent {
        /// The manifest.
        path: PathBuf,
        /// How.
        source: Box<RecordError>,
    },
    /// A record in another version of the format.
    #[error("{} is in version {found} of the format; this program reads version {supported}", .path.display())]
    Version {
        /// The manifest.
        path: PathBuf,
        /// Its version.
        found: u32,
        /// The version that this program reads.
        supported: u32,
    },
    /// A file that the manifest names is not there.
    #[error("the record is torn: {} is missing", .path.display())]
    MissingFile {
        /// The file.
        path: PathBuf,
    },
    /// A file is shorter or longer than it was written.
    #[error("the record is torn: {} holds {found} bytes, but {expected} were written", .path.display())]
    WrongLength {
        /// The file.
        path: PathBuf,
        /// The bytes written.
        expected: u64,
        /// The bytes there are.
        found: u64,
    },
    /// Bytes that are not those that were written.
    #[error(
        "the record is torn: checksum {found:08x} of {what} in {} is not {expected:08x}, with which it was written",
        .path.display()
    )]
    Checksum {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: String,
        /// CRC-32 of what was written.
        expected: u32,
        /// CRC-32 of what is there.
        found: u32,
    },
    /// A file of another record.
    #[error("{} belongs to another record: it is of {found}, but the manifest is of {expected}", .path.display())]
    ForeignFile {
        /// The file.
        path: PathBuf,
        /// Step, rank and world size of the manifest.
        expected: String,
        /// Those of the file.
        found: String,
    },
    /// A part that is not a safetensors file, or not with the entries of the manifest.
    #[error("{} is not the part of a record that its manifest describes: {reason}", .path.display())]
    BadPart {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },

    /// An entry that the record does not have.
    #[error("{} has no entry `{name}`{}", .path.display(), nearest_of(.nearest))]
    MissingEntry {
        /// The manifest.
        path: PathBuf,
        /// The entry.
        name: String,
        /// The entry of the record whose name is most alike.
        nearest: Option<String>,
    },
    /// A section without entries.
    #[error("{} has no entries in the section `{section}`; its sections are {}", .path.display(), .sections.join(", "))]
    NoSection {
        /// The record.
        path: PathBuf,
        /// The section.
        section: String,
        /// Those that it has.
        sections: Vec<String>,
    },
    /// An entry of another type than wanted.
    #[error("`{name}` is {found} in {}, but {wanted} is wanted", .path.display())]
    DtypeDiffers {
        /// The manifest.
        path: PathBuf,
        /// The entry.
        name: String,
        /// Its type in the record.
        found: Dtype,
        /// The type that was asked for.
        wanted: Dtype,
    },
    /// An entry of another shape than wanted.
    #[error("`{name}` has shape {found:?} in {}, but {wanted:?} is wanted", .path.display())]
    ShapeDiffers {
        /// The manifest.
        path: PathBuf,
        /// The entry.
        name: String,
        /// Its shape in the record.
        found: Vec<usize>,
        /// The shape that was asked for.
        wanted: Vec<usize>,
    },

    /// A name that cannot be an entry's.
    #[error("`{name}` cannot name an entry: {reason}")]
    InvalidName {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A piece that reaches beyond its tensor.
    #[error("elements {range:?} of `{name}` of shape {shape:?}: it has {elements}")]
    OutOfBounds {
        /// The entry.
        name: String,
        /// The elements of the piece.
        range: Range<usize>,
        /// The whole tensor's shape.
        shape: Vec<usize>,
        /// The whole tensor's number of elements; the largest there is if it does not fit.
        elements: usize,
    },
    /// A piece with other than its elements' bytes.
    #[error("`{name}`: {found} bytes were given for a piece of {expected} bytes")]
    ByteLength {
        /// The entry.
        name: String,
        /// The bytes that its elements take.
        expected: usize,
        /// The bytes given.
        found: usize,
    },
    /// A type whose elements are no whole bytes.
    #[error("`{name}`: elements of {dtype} are no whole bytes and cannot be cut into pieces")]
    SubByte {
        /// The entry.
        name: String,
        /// The type.
        dtype: Dtype,
    },
    /// The bytes of a piece could not be had.
    #[error("cannot get the bytes of `{name}`: {reason}")]
    Unavailable {
        /// The entry.
        name: String,
        /// Its owner's reason.
        reason: String,
    },
    /// The one who loads could not use what was read.
    #[error("`{name}` was read, but could not be used: {reason}")]
    NotTaken {
        /// The entry.
        name: String,
        /// The reason of the one who loads.
        reason: String,
    },
    /// Two ranks describe one tensor differently.
    #[error("`{name}` is {} of rank {first_rank} and {} of rank {second_rank}", described(.first), described(.second))]
    Contradiction {
        /// The entry.
        name: String,
        /// A rank.
        first_rank: usize,
        /// Type and shape there.
        first: (Dtype, Vec<usize>),
        /// Another rank.
        second_rank: usize,
        /// Type and shape there.
        second: (Dtype, Vec<usize>),
    },
    /// A piece that one rank gives twice.
    #[error("the piece {piece} was given twice")]
    GivenTwice {
        /// Name and elements.
        piece: String,
    },
    /// An element in two pieces.
    #[error(
        "elements {range:?} of `{name}` are in a piece of rank {first_rank} and again in one of rank {second_rank}"
    )]
    Overlap {
        /// The entry.
        name: String,
        /// The elements.
        range: Range<usize>,
        /// The rank whose piece begins first.
        first_rank: usize,
        /// The other.
        second_rank: usize,
    },
    /// Elements in no piece.
    #[error("elements {range:?} of `{name}` are on no rank")]
    NotCovered {
        /// The entry.
        name: String,
        /// The elements.
        range: Range<usize>,
    },
    /// Ranks save or load what does not belong together.
    #[error(
        "rank {rank} has {what} {theirs}, rank 0 {ours}: all ranks save and load the same record"
    )]
    RanksDiffer {
        /// What differs.
        what: &'static str,
        /// The rank that differs from rank 0.
        rank: usize,
        /// Its value.
        theirs: String,
        /// That of rank 0.
        ours: String,
    },

    /// State of a training that cannot be taken apart for a record, or put together from one.
    #[error(transparent)]
    State(#[from] ZeroOptimizerError),
    /// A record with tensors that the model has no place for.
    #[error("{} has a tensor {tensor}, which the model has not: it is of another model", .path.display())]
    OtherModel {
        /// The record.
        path: PathBuf,
        /// Path of the first such tensor.
        tensor: String,
    },
    /// A record that was saved between two updates, in which each rank has sums of gradients of its own.
    #[error(
        "{} is of the middle of a window of micro-batches, whose sums are each rank's own; it was saved by {saved_by}, and this \
         is {wanted_by}: load it as it was saved, or save after an update", .path.display()
    )]
    PartialWindow {
        /// The record.
        path: PathBuf,
        /// Ranks and sharding that saved it.
        saved_by: String,
        /// Ranks and sharding that want it.
        wanted_by: String,
    },

    /// Another rank failed, so all stop.
    #[error("rank {rank} failed: {message}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// The group of ranks is lost: one hangs, left, panicked or did something else.
    #[error(transparent)]
    Group(ZeroError),
    /// A message between ranks that cannot be written or read: they run different programs, or a path is not UTF-8.
    #[error("a message between ranks cannot be understood: {reason}")]
    Message {
        /// Why.
        reason: String,
    },
}

/// An error of the file system, with what was tried on which path.
pub(super) fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> RecordError {
    let path = path.to_owned();
    move |source| RecordError::Io {
        action,
        path,
        source,
    }
}

fn of_step(step: &Option<u64>) -> String {
    step.map_or_else(String::new, |step| format!(" of step {step}"))
}

fn unfinished(partial: usize) -> String {
    match partial {
        0 => String::new(),
        1 => " (one was not finished)".to_owned(),
        more => format!(" ({more} were not finished)"),
    }
}

fn nearest_of(nearest: &Option<String>) -> String {
    nearest
        .as_ref()
        .map_or_else(String::new, |name| format!("; nearest is `{name}`"))
}

fn described((dtype, shape): &(Dtype, Vec<usize>)) -> String {
    format!("{dtype} {shape:?}")
}
