//! How long a window is, how it is normalised, and what happens to a non-finite micro-batch.

use serde::{Deserialize, Serialize};

use crate::AccumError;

/// The windows of a [`burn_update::Update`]: `.accumulate(AccumConfig::mean(8))?`.
/// [`Accumulation`](crate::Accumulation) has further settings.
///
/// Fields that a file leaves out take their defaults; names that do not exist are refused.
///
/// ```
/// use burn_accum::{AccumConfig, Normalization};
///
/// let config = AccumConfig { steps: 8, normalization: Normalization::Tokens };
/// assert!(config.validate().is_ok());
///
/// let error = AccumConfig { steps: 0, ..config }.validate().unwrap_err();
/// assert_eq!(error.to_string(), "a window of 0 micro-batches from update 0 on: it must be at least 1");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccumConfig {
    /// Micro-steps a window (Accelerate's and DeepSpeed's `gradient_accumulation_steps`, optax's
    /// `every_k_schedule`). Default 1: every micro-batch is an update.
    pub steps: usize,
    /// What the sum of a window's gradients is divided by. Default [`Normalization::Mean`].
    pub normalization: Normalization,
}

/// What the sum of a window's gradients is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Normalization {
    /// The true number of micro-batches in the window: without dropped ones, and less than `steps`
    /// in an epoch's shorter tail (where Accelerate divides by `steps`). The default.
    #[default]
    #[serde(alias = "Mean")]
    Mean,
    /// Nothing, as Burn's own `grads_accumulation`.
    #[serde(alias = "Sum")]
    Sum,
    /// The number of counted items (tokens) in the window; the gradients must be of loss sums. It
    /// is exact also when micro-batches hold different numbers of items (transformers'
    /// `num_items_in_batch`). [`Counted`](crate::Counted) provides the number.
    #[serde(alias = "Tokens")]
    Tokens,
}

/// What happens to a micro-batch with an infinite or NaN gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NonFinite {
    /// It is dropped from the window with its weight, counted, and named in the log and in
    /// [`UpdateCounter::last_dropped`](crate::UpdateCounter::last_dropped). It still counts as a
    /// micro-step of the window, which then has fewer micro-batches; a window whose micro-batches
    /// are all dropped is no update. With optax's `skip_not_finite`, and here under a loss scaler,
    /// the window waits for another micro-batch instead. The default.
    ///
    /// The device decides, with a product, a sum and a select a parameter each micro-step, and one
    /// host read each update. Windows of one micro-batch, and ranks, which decide together, take a
    /// sum a parameter and a host read each micro-step.
    #[default]
    Drop,
    /// It goes into the sum and so reaches the optimizer. For an optimizer that checks by itself. A
    /// non-finite update is named in the log. Under a loss scaler it is `Drop`.
    ///
    /// Costs one sum over the gradients and one host read, each update.
    Propagate,
}

/// The window's length as a function of the number of updates taken so far (optax's
/// `every_k_schedule`).
///
/// ```
/// use burn_accum::WindowSchedule;
///
/// // Small windows at first, from the thousandth update on large ones.
/// let schedule = WindowSchedule::Piecewise(vec![(0, 4), (1000, 32)]);
/// assert_eq!((schedule.steps_at(999), schedule.steps_at(1000)), (4, 32));
/// assert!(WindowSchedule::Piecewise(vec![(10, 4)]).validate().is_err());
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WindowSchedule {
    /// Always the same number of micro-steps.
    Constant(usize),
    /// Pairs `(from_update, steps)` in increasing order, the first from update 0: windows have
    /// `steps` micro-steps from that update on.
    Piecewise(Vec<(u64, usize)>),
}

impl Default for AccumConfig {
    fn default() -> Self {
        Self::mean(1)
    }
}

impl AccumConfig {
    /// The mean of `steps` micro-batches.
    pub fn mean(steps: usize) -> Self {
        Self {
            steps,
            normalization: Normalization::Mean,
        }
    }

    /// The mean over all counted items of `steps` micro-batches: see [`Counted`](crate::Counted).
    pub fn tokens(steps: usize) -> Self {
        Self {
            steps,
            normalization: Normalization::Tokens,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`AccumError::ZeroSteps`].
    pub fn validate(&self) -> Result<(), AccumError> {
        at_least_one(0, self.steps)
    }
}

impl WindowSchedule {
    /// The length of the window that follows `updates` updates.
    ///
    /// # Panics
    ///
    /// If the schedule is [invalid](Self::validate).
    pub fn steps_at(&self, updates: u64) -> u64 {
        let steps = match self {
            Self::Constant(steps) => *steps,
            Self::Piecewise(pieces) => {
                let after = pieces.partition_point(|&(from_update, _)| from_update <= updates);
                pieces[after - 1].1
            }
        };
        steps as u64
    }

    /// Checks every piece.
    ///
    /// # Errors
    ///
    /// [`AccumError::ZeroSteps`], [`AccumError::InvalidSchedule`].
    pub fn validate(&self) -> Result<(), AccumError> {
        let pieces = match self {
            Self::Constant(steps) => return at_least_one(0, *steps),
            Self::Piecewise(pieces) => pieces,
        };
        let refuse = |index, from_update, expected| {
            Err(AccumError::InvalidSchedule {
                index,
                from_update,
                expected,
            })
        };
        match pieces.first() {
            None => return refuse(0, 0, "there: a schedule has at least one entry"),
            Some(&(0, _)) => {}
            Some(&(from_update, _)) => return refuse(0, from_update, "0"),
        }
        for (index, pair) in pieces.windows(2).enumerate() {
            if pair[1].0 <= pair[0].0 {
                return refuse(index + 1, pair[1].0, "later than the entry before");
            }
        }
        pieces
            .iter()
            .try_for_each(|&(from_update, steps)| at_least_one(from_update, steps))
    }
}

fn at_least_one(from_update: u64, steps: usize) -> Result<(), AccumError> {
    match steps {
        0 => Err(AccumError::ZeroSteps { steps, from_update }),
        _ => Ok(()),
    }
}
