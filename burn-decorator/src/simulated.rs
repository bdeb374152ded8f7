//! Whether tensors have values: an estimate runs a program without data.

use core::cell::Cell;

use crate::cell::Scope;

thread_local! {
    static SIMULATED: Cell<bool> = const { Cell::new(false) };
}

/// Until it is dropped, what this thread reads from tensors is not real, and no reason to refuse a
/// step.
pub fn simulate_values() -> Scope<bool> {
    Scope::enter(&SIMULATED, true)
}

/// Whether what this thread reads from tensors is not real.
pub fn values_are_simulated() -> bool {
    SIMULATED.get()
}
