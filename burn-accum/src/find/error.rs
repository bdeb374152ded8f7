//! What can go wrong while a micro-batch is looked for, with the values.

use thiserror::Error;

use super::report::mebibytes;
use crate::InvalidValue;

/// Errors of [`find_micro_batch`](super::find_micro_batch) and of a
/// [`Partition`](super::Partition).
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum FindError {
    /// A number that cannot work.
    #[error(transparent)]
    InvalidValue(#[from] InvalidValue),
    /// More items in a micro-batch than in all of an update.
    #[error(
        "a micro-batch of {micro_batch} does not fit into an effective batch of {effective_batch}: it may be at most \
         {effective_batch}"
    )]
    LargerThanEffectiveBatch {
        /// Items in a micro-batch.
        micro_batch: usize,
        /// Items in an update.
        effective_batch: usize,
    },
    /// A mean over micro-batches of different sizes is not the mean over their items.
    #[error(
        "micro-batches of {micro_batch} leave a last one of {last} in an effective batch of {effective_batch}, which \
         Normalization::Mean would weight as a whole one: use Normalization::Tokens with `Counted`, or micro-batches of \
         {even}"
    )]
    UnevenMean {
        /// Items in an update.
        effective_batch: usize,
        /// Items in all micro-batches but the last.
        micro_batch: usize,
        /// Items in the last.
        last: usize,
        /// The largest size below that leaves no smaller one.
        even: usize,
    },
    /// Not even a micro-batch of one fits.
    #[error(
        "a micro-batch of one needs {}, and with {:.0} % kept free that is a limit of {}, not of {}: raise the limit to {needed_bytes} \
         bytes, or make the model smaller, its sequences shorter, or recompute activations",
        mebibytes(*.peak_bytes), .margin * 100.0, mebibytes(*.needed_bytes), mebibytes(*.limit_bytes)
    )]
    LimitTooSmall {
        /// The limit that was set.
        limit_bytes: u64,
        /// The smallest limit that would do, the margin included.
        needed_bytes: u64,
        /// What a micro-batch of one took at most.
        peak_bytes: u64,
        /// The share of the limit that is kept free.
        margin: f64,
    },
    /// The step fails whatever the size.
    #[error("the step fails with a micro-batch of one: {reason}")]
    StepFails {
        /// Its panic, its error or that of the device.
        reason: String,
    },
    /// The probe did not see the step allocate anything.
    #[error(
        "the probe measures nothing: {before_bytes} bytes were in use before a step with a micro-batch of {micro_batch} and \
         {peak_bytes} bytes at most during it; it must see the memory of the device that the step runs on (a \
         counting allocator has to be the `#[global_allocator]` of the program)"
    )]
    NothingMeasured {
        /// Size of the trial.
        micro_batch: usize,
        /// In use before.
        before_bytes: u64,
        /// The most in use meanwhile.
        peak_bytes: u64,
    },
    /// A larger micro-batch took less than half the memory of a smaller one.
    #[error(
        "a micro-batch of {larger} took {}, less than half of what one of {smaller} took, {}: the probe misses peaks or \
         the step does not use its size",
        mebibytes(*.larger_bytes), mebibytes(*.smaller_bytes)
    )]
    PeaksMissed {
        /// A size.
        smaller: usize,
        /// What it took at most.
        smaller_bytes: u64,
        /// A larger size.
        larger: usize,
        /// What that took at most.
        larger_bytes: u64,
    },
}
