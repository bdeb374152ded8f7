//! Where in a step a thread is.
//!
//! Gradients, and what an optimizer computes from them, get no recipe: a recipe would keep a step's
//! whole tape for a tensor that is used at once, and the recipes of one step would refer to those
//! of earlier steps. A gradient is the seed of a backward pass, or computed from it.
//!
//! Which pass runs is told by [`gradient::backward`](burn_decorator::gradient::backward) and
//! [`gradient::update`](burn_decorator::gradient::update) where a backend or an optimizer calls
//! them: see [`Told`]. Elsewhere a backward pass starts at its seed, and an update when an
//! optimizer of Burn compares the devices of a gradient and its parameter. A forward pass starts at
//! an operation that only forward passes run.

/// The float tensor whose device was read last.
#[derive(Clone, Copy)]
pub(crate) struct DeviceRead {
    pub of: Read,
    pub after_operation: u64,
}

impl DeviceRead {
    pub const NONE: Self = Self {
        of: Read::Other,
        after_operation: 0,
    };
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
