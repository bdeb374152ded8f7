//! Where in the training a collective belongs.

use core::fmt;

/// Stands in the labels of collectives, so that ranks that differ in it stop there with both sides shown, at no cost in bytes
/// that would not be sent anyway.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum StepTag {
    /// A backward pass.
    Backward {
        /// Steps of the optimizer so far.
        steps: u64,
    },
    /// A step of the optimizer.
    Step {
        /// Counted from 1.
        number: u64,
        /// Its learning rate: written so that other bits are another text.
        lr: f64,
    },
}

impl fmt::Display for StepTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Backward { steps } => write!(f, "after step {steps}"),
            Self::Step { number, lr } => write!(f, "step {number}, lr {lr:?}"),
        }
    }
}
