//! The thread's operation count, and where in a step a thread is.
//!
//! Gradients, and what an optimizer computes from them, get no recipe: a recipe would keep a step's
//! whole tape for a tensor that is used at once, and the recipes of one step would refer to those
//! of earlier steps. A gradient is the seed of a backward pass, or computed from it. A backward
//! pass starts at its seed, a forward pass at an operation that only forward passes run.

use std::cell::Cell;

thread_local! {
    static OPERATIONS: Cell<u64> = const { Cell::new(0) };
    /// Whether the float tensor whose device was read last is a gradient that backward works on.
    /// Then a new tensor is no seed of another backward pass: autodiff reads the device of the loss
    /// before it makes the seed, that of a gradient before the ones of a mean or sum.
    pub(crate) static AT_GRADIENT: Cell<bool> = const { Cell::new(false) };
}

/// Counts an operation of this thread, and returns its number.
#[inline]
pub(crate) fn tick() -> u64 {
    OPERATIONS.with(|operations| {
        operations.set(operations.get() + 1);
        operations.get()
    })
}

/// The number of this thread's last operation.
#[inline]
pub(crate) fn now() -> u64 {
    OPERATIONS.get()
}

/// Where in a step a thread is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Operations are recorded.
    Forward,
    /// Tensors computed from the seed are not recorded.
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

    /// Where in a step a thread is once a pass has begun.
    pub fn begin(self, phase: Phase) -> Self {
        let begins = phase == Phase::Backward && self.phase == Phase::Forward;
        Self {
            phase,
            number: self.number + u64::from(begins),
        }
    }
}

/// What a tensor was computed from, under a budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lineage {
    Activation,
    /// The seed of a backward pass, or what was computed from it.
    Gradient,
}
