//! What can go wrong, with the values.

use std::ops::Range;

use thiserror::Error;

use super::InstructionSet;

/// Errors of [`HostAdamW`](super::HostAdamW). Where one is returned, no element has changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HostAdamWError {
    /// A number that cannot work.
    #[error("HostAdamW: {name} = {value}, but it must be {expected}")]
    InvalidValue {
        /// Which number.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// The host has no memory for the state.
    #[error(
        "HostAdamW: no host memory for a buffer of {bytes} bytes: {source}; each parameter takes 12 bytes here"
    )]
    OutOfMemory {
        /// Bytes asked for, of one of three buffers.
        bytes: usize,
        /// What the system says.
        source: std::io::Error,
    },
    /// Slices that belong together differ in length.
    #[error("HostAdamW: {actual} elements of {what}, but {expected} are needed")]
    LengthMismatch {
        /// Which slice.
        what: &'static str,
        /// How many elements it must have.
        expected: usize,
        /// How many it has.
        actual: usize,
    },
    /// A range beyond the end.
    #[error("HostAdamW: elements {}..{} of a buffer of {len}", range.start, range.end)]
    OutOfRange {
        /// The refused elements.
        range: Range<usize>,
        /// Elements there are.
        len: usize,
    },
    /// An element would be updated a second time in the same step.
    #[error(
        "HostAdamW: elements {}..{} are to be updated in step {step}, which has updated {}..{} before",
        range.start, range.end, updated.start, updated.end
    )]
    UpdatedTwice {
        /// The step's number, counted from 1.
        step: u64,
        /// The refused elements.
        range: Range<usize>,
        /// The updated elements that they overlap with.
        updated: Range<usize>,
    },
    /// A step ends before each element is updated. The rest can be updated, or the state loaded again.
    #[error("HostAdamW: step {step} ends, but elements {}..{} are not updated", missing.start, missing.end)]
    Unfinished {
        /// The step's number, counted from 1.
        step: u64,
        /// The first elements that are missing.
        missing: Range<usize>,
    },
    /// A step was given up when a part of the elements were updated, so the state is of no step.
    #[error(
        "HostAdamW: step {step} was given up after {updated} of {len} elements were updated: load the last record, and decide \
         whether to skip a step before it begins"
    )]
    Torn {
        /// The step's number, counted from 1.
        step: u64,
        /// Elements it had updated.
        updated: usize,
        /// Elements there are.
        len: usize,
    },
    /// This processor, or this build of the program, has no such instructions.
    #[error("HostAdamW: {wanted} is not available here, but {available:?} are")]
    NoInstructionSet {
        /// What was asked for.
        wanted: InstructionSet,
        /// What there is.
        available: Vec<InstructionSet>,
    },
}
