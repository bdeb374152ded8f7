//! The backward pass or step that a collective belongs to.

use core::fmt;

/// Part of the labels of collectives, so that ranks that differ in it stop with both labels in the error. Costs no additional
/// message.
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
        /// Its learning rate, written so that different bits give different texts.
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
