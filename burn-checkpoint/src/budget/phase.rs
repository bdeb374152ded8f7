//! Telling forward from backward, below autodiff.
//!
//! Gradients and what an optimizer makes of them are not worth a recipe: it would keep a step's whole tape for the sake of a
//! tensor that is needed at once, and steps would chain. They are known by their descent from the seed of a backward pass.

use crate::op::{OpInfo, Work};

/// Where in a step a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Operations are recorded.
    Forward,
    /// What descends from the seed is not recorded.
    Backward,
}

/// The number of a step and where in it a thread is. A step begins with its backward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub phase: Phase,
    /// Backward passes so far.
    pub number: u64,
}

impl Step {
    pub const FIRST: Self = Self {
        phase: Phase::Forward,
        number: 0,
    };

    /// A backward pass begins.
    pub fn backward(self) -> Self {
        match self.phase {
            Phase::Backward => self,
            Phase::Forward => Self {
                phase: Phase::Backward,
                number: self.number + 1,
            },
        }
    }

    /// A forward pass begins.
    pub fn forward(self) -> Self {
        Self {
            phase: Phase::Forward,
            ..self
        }
    }
}

/// Whether an operation is one that only forward passes use, on activations and parameters.
pub(crate) fn is_forward_only(op: &OpInfo) -> bool {
    matches!(op.group, "ModuleOps" | "ActivationOps") && !is_backward_only(op)
}

/// Whether an operation is the product of a layer: linear, convolutions, attention. No backward pass runs one, unless on gradients; what
/// autodiff computes once more itself is cheaper than they are.
pub(crate) fn is_layer(op: &OpInfo) -> bool {
    op.work == Work::Compute && is_forward_only(op)
}

/// Whether an operation computes gradients.
pub(crate) fn is_backward_only(op: &OpInfo) -> bool {
    op.name.ends_with("_backward")
}
