//! What can go wrong, with the values.

use thiserror::Error;

use burn_decorator::non_finite::name_some;

/// A number that cannot work.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
#[error("{name} = {value}, but it must be {expected}")]
pub struct InvalidValue {
    /// Which number.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// What it must be.
    pub expected: &'static str,
}

impl InvalidValue {
    /// An error unless the value is as `expected`.
    pub(crate) fn unless(
        holds: bool,
        name: &'static str,
        value: f64,
        expected: &'static str,
    ) -> Result<(), Self> {
        let error = Self {
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

/// Errors of gradient accumulation.
///
/// Constructors return them. A step of an update returns them in a
/// [`burn_update::UpdateError`], whose `cause` gives them; in a `Learner` it panics with the
/// error's message.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AccumError {
    /// A window of no micro-batches.
    #[error(
        "a window of {steps} micro-batches from update {from_update} on: it must be at least 1"
    )]
    ZeroSteps {
        /// The refused length.
        steps: usize,
        /// The first update it would hold for.
        from_update: u64,
    },
    /// A piecewise schedule that does not begin at update 0, or whose updates do not increase.
    #[error(
        "WindowSchedule: entry {index} begins at update {from_update}, but it must be {expected}"
    )]
    InvalidSchedule {
        /// Index of the refused entry.
        index: usize,
        /// The update it begins at.
        from_update: u64,
        /// What it must be.
        expected: &'static str,
    },
    /// A number that cannot work.
    #[error(transparent)]
    InvalidValue(#[from] InvalidValue),

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
}
