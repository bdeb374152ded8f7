//! How long a window is, how it is normalised, and what happens to a non-finite micro-batch.

use serde::{Deserialize, Serialize};

use crate::{AccumError, Accumulation};

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
/// assert_eq!(error.to_string(), "a window of 0 micro-batches: it must be at least 1");
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

impl Default for AccumConfig {
    fn default() -> Self {
        Self::mean(1)
    }
}

burn_decorator::config!(AccumConfig {
    steps: usize = with_steps,
    normalization: Normalization = with_normalization,
});

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

    /// The windows, with further settings and handles.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn init(self) -> Result<Accumulation, AccumError> {
        Accumulation::new(self)
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`AccumError::ZeroSteps`].
    pub fn validate(&self) -> Result<(), AccumError> {
        match self.steps {
            0 => Err(AccumError::ZeroSteps),
            _ => Ok(()),
        }
    }
}
