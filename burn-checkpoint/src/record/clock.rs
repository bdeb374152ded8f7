//! The thread's operation count, and where in a step a thread is.
//!
//! Gradients, and what an optimizer computes from them, get no recipe: a recipe would keep a step's
//! whole tape for a tensor that is used at once, and the recipes of one step would refer to those
//! of earlier steps. A gradient is the seed of a backward pass, or computed from it.
//!
//! Which pass runs is told by [`gradient::backward`](burn_decorator::gradient::backward) and
//! [`gradient::update`](burn_decorator::gradient::update) where a backend or an optimizer calls
//! them: see [`Told`]. Elsewhere a backward pass starts at its seed, and an update when an optimizer
//! of Burn compares the devices of a gradient and its parameter. A forward pass starts at an
//! operation that only forward passes run.

use std::cell::Cell;

thread_local! {
    static OPERATIONS: Cell<u64> = const { Cell::new(0) };
    static DEVICE_READ: Cell<DeviceRead> = const {
        Cell::new(DeviceRead { of: Read::Other, after_operation: 0 })
    };
}

/// The float tensor whose device was read last.
#[derive(Clone, Copy)]
struct DeviceRead {
    of: Read,
    after_operation: u64,
}

/// What a float tensor is whose device is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Read {
    /// A gradient of this step that nothing else refers to.
    Gradient,
    /// What an earlier step's gradients became: a parameter, or state of an optimizer.
    State,
    Other,
}

/// What this thread was told of passes. Once it was told of one, none of that kind is guessed.
#[derive(Clone, Copy)]
pub(crate) struct Told {
    /// The number of the last backward pass that was told.
    pub backward: Option<u64>,
    pub update: bool,
}

impl Told {
    pub const NOTHING: Self = Self {
        backward: None,
        update: false,
    };
}

/// Notes that the device of a float tensor is read. Returns whether this begins an update: of the
/// programs that run after a gradient was made, only an optimizer reads the device of a parameter
/// right after that of a gradient.
pub(crate) fn reads_device(of: Read) -> bool {
    let after_operation = now();
    let last = DEVICE_READ.replace(DeviceRead {
        of,
        after_operation,
    });
    last.of == Read::Gradient && of != Read::Gradient && last.after_operation == after_operation
}

/// Whether the float tensor whose device was read last is one that backward works on. Then a new
/// tensor is no seed of another backward pass: autodiff reads the device of the loss before it
/// makes the seed, that of a gradient before the ones of a mean or sum.
pub(crate) fn is_at_gradient() -> bool {
    DEVICE_READ.get().of != Read::Other
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
    /// As [`Self::Backward`], but the pass is over: the tape has released what it kept.
    Update,
}

/// The number of a step and where in it a thread is. A step begins with a forward pass; or with a
/// backward pass that follows another one, if no forward pass was noticed in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step {
    pub phase: Phase,
    pub number: u64,
}

impl Step {
    pub const FIRST: Self = Self {
        phase: Phase::Forward,
        number: 0,
    };

    /// Where in a step a thread is once a pass has begun.
    pub fn begin(self, phase: Phase) -> Self {
        let begins = phase != Phase::Update && self.phase != Phase::Forward;
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
    /// What was computed after a forward pass from state alone: from what earlier steps left.
    State,
}
