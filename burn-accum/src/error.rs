//! What can go wrong, with the values.

use thiserror::Error;

use burn_decorator::non_finite::name_some;

use crate::find::mebibytes;

/// Errors of gradient accumulation, and of the search for a micro-batch.
///
/// Constructors and [`find_micro_batch`](crate::find_micro_batch) return them. A step of an update
/// returns them in a [`burn_update::UpdateError`], whose `cause` gives them; in a `Learner` it
/// panics with the error's message.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AccumError {
    /// A window of no micro-batches.
    #[error("a window of 0 micro-batches: it must be at least 1")]
    ZeroSteps,
    /// A number that cannot work.
    #[error("{name} = {value}, but it must be {expected}")]
    InvalidValue {
        /// Which number.
        name: &'static str,
        /// Its value.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },

    /// Under `Tokens`, gradients arrived without the number of items they came from.
    #[error(
        "Normalization::Tokens, but micro-batch {micro_batch} does not tell how many items it counts: end \
         `TrainStep::step` with `Counted::mean(loss, items).output(self, output)`; with Burn's own `grads_accumulation` or \
         several devices the model also needs a `CountSlot` field, or Burn's accumulators lose the count"
    )]
    MissingCount {
        /// Number of the micro-batch, counted from 1.
        micro_batch: u64,
    },
    /// Under `Mean`, gradients arrived that are of a sum over counted items.
    #[error(
        "Normalization::Mean, but micro-batch {micro_batch} holds gradients of a loss sum over {items} counted items: \
         use Normalization::Tokens, or `TrainOutput::new` instead of `Counted`"
    )]
    UnexpectedCount {
        /// Number of the micro-batch, counted from 1.
        micro_batch: u64,
        /// Its items.
        items: f64,
    },
    /// A count that is negative, infinite or NaN.
    #[error(
        "micro-batch {micro_batch} counts {items} items: a count must be finite and not negative"
    )]
    InvalidCount {
        /// Number of the micro-batch, counted from 1.
        micro_batch: u64,
        /// The refused count.
        items: f64,
    },
    /// No micro-batch of a window counts any item, so there is no mean over them.
    #[error(
        "the {micro_batches} micro-batches of the window after update {updates} count no items at all: there is no mean over them"
    )]
    NoItems {
        /// Updates taken before.
        updates: u64,
        /// Micro-batches in the window.
        micro_batches: u64,
    },

    /// Too many windows in a row had only non-finite micro-batches.
    #[error(
        "all micro-batches of the last {windows} windows were dropped as non-finite; the last one in {}",
        name_some(.parameters)
    )]
    NothingFinite {
        /// How many windows.
        windows: u64,
        /// Paths of the parameters with non-finite gradients in the last micro-batch.
        parameters: Vec<String>,
    },

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

impl AccumError {
    /// An error unless the value is as `expected`.
    pub(crate) fn unless(
        holds: bool,
        name: &'static str,
        value: f64,
        expected: &'static str,
    ) -> Result<(), Self> {
        let error = Self::InvalidValue {
            name,
            value,
            expected,
        };
        if holds { Ok(()) } else { Err(error) }
    }

    pub(crate) fn unless_positive(name: &'static str, value: usize) -> Result<(), Self> {
        Self::unless(value > 0, name, value as f64, "at least 1")
    }
}
