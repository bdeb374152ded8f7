//! Whether tensors have values: an estimate runs a program without data. What a decorator else learns
//! from values it asks here.

use core::cell::Cell;

use burn_backend::DeviceId;
use parking_lot::RwLock;

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

/// Devices without data that stand for a device on which Burn's default composes GELU.
static COMPOSING_GELU: RwLock<Vec<DeviceId>> = RwLock::new(Vec::new());

/// Notes that GELU is composed of other operations on the device that this one without data stands
/// for.
pub fn compose_gelu(device: DeviceId) {
    let mut devices = COMPOSING_GELU.write();
    if !devices.contains(&device) {
        devices.push(device);
    }
}

/// Whether GELU is composed of other operations on the device that this one without data stands
/// for.
pub fn composes_gelu(device: DeviceId) -> bool {
    COMPOSING_GELU.read().contains(&device)
}
