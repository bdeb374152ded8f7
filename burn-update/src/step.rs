//! What parts know of a step.

use std::sync::Arc;

use burn::optim::LearningRate;
use burn::tensor::{DType, Tensor, backend::Backend};
use burn_decorator::non_finite::Verdict;

use crate::{Ranks, UpdateError};

/// The values of one step, on the backend without autodiff: a part reads those that the parts
/// before it filled in, and fills in its own.
///
/// | field | filled in by | read by |
/// |---|---|---|
/// | `lr`, `is_flush`, `micro_batches`, `items` | the update, from its arguments | all parts |
/// | `is_scaled`, `half_precision` | the update, where there is a loss scale | the scale, the accumulation |
/// | `ranks`, `decides_on_host` | the update, where gradients are reduced over ranks | the accumulation, the scale |
/// | `verdict` | the accumulation; without one the update | the scale |
/// | `norm` | a reduction over ranks; then the clipping | the clipping; then parts that look at the updated model |
/// | `overflowed` | a reduction over ranks | the scale, the accumulation |
/// | `outcome` | the update; a reduction over ranks | the scale, the accumulation, the parts |
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Step<I: Backend> {
    /// The learning rate.
    pub lr: LearningRate,
    /// Whether it ends a window early, without a micro-batch of its own.
    pub is_flush: bool,
    /// Micro-batches that arrived: one for each device that brought gradients.
    pub micro_batches: u64,
    /// The number of items (tokens) of each micro-batch that counts them, f32 `[1]` each.
    pub items: Vec<Tensor<I, 1>>,
    /// Whether a loss scale counts overflows: a micro-batch with a non-finite gradient then counts
    /// for nothing, as if it had not arrived.
    pub is_scaled: bool,
    /// A parameter with a gradient that is itself in 16 bits.
    pub half_precision: Option<HalfPrecision>,
    /// Whether the gradients are finite, and which are not. The host may not know it yet. `None` if
    /// nothing looked for it.
    pub verdict: Option<Arc<Verdict<I>>>,
    /// The ranks that decide together, if several train the model.
    pub ranks: Option<Arc<dyn Ranks>>,
    /// Whether decisions about gradients are made on the host at once, because ranks make them
    /// together or the gradients are there.
    pub decides_on_host: bool,
    /// The norm over all parameters before it was clipped, f32 `[1]`.
    pub norm: Option<Tensor<I, 1>>,
    /// The paths of the gradients that overflowed when they were reduced over ranks, the same on all
    /// of them, if the step is left out because of them: a loss scale counts it. Without a scale an
    /// overflow reaches the parameters, as without ranks.
    pub overflowed: Vec<String>,
    /// What becomes of the step.
    pub outcome: StepOutcome,
}

/// What becomes of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum StepOutcome {
    /// No parameter changes: its gradients wait in a window, or it is skipped.
    #[default]
    Waits,
    /// Parameters are updated.
    Updates,
}

/// A parameter in 16 bits that has a gradient.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HalfPrecision {
    /// Its path.
    pub path: String,
    /// Its type.
    pub dtype: DType,
}

impl<I: Backend> Step<I> {
    /// A step of no micro-batch so far.
    pub(crate) fn new(lr: LearningRate) -> Self {
        Self {
            lr,
            is_flush: false,
            micro_batches: 0,
            items: Vec::new(),
            is_scaled: false,
            half_precision: None,
            verdict: None,
            ranks: None,
            decides_on_host: false,
            norm: None,
            overflowed: Vec::new(),
            outcome: StepOutcome::Waits,
        }
    }

    /// The names of the parameters with a non-finite gradient on any rank, from those of this rank.
    /// With several ranks it is a collective.
    ///
    /// # Errors
    ///
    /// Those of [`Ranks::non_finite_on_any`].
    pub fn non_finite_on_any_rank(&self, own: Vec<String>) -> Result<Vec<String>, UpdateError> {
        match &self.ranks {
            Some(ranks) => ranks.non_finite_on_any(own),
            None => Ok(own),
        }
    }

    /// Whether the step updates parameters.
    pub fn updates(&self) -> bool {
        self.outcome == StepOutcome::Updates
    }
}
