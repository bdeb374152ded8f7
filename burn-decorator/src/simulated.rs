//! Whether tensors have values: an estimate runs a program without data. What decorators otherwise
//! learn from values, they ask here.

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

/// Devices without data, and the operations whose kernels lose digits on the devices that they
/// stand for.
static INEXACT: RwLock<Vec<(DeviceId, &'static [&'static str])>> = RwLock::new(Vec::new());

/// Notes the operations, named as rows are (`gelu`, `float_tanh`), whose kernels on the device that
/// this one without data stands for lose more than one rounding of a low type.
pub fn set_inexact(device: DeviceId, operations: &'static [&'static str]) {
    let mut devices = INEXACT.write();
    devices.retain(|(known, _)| *known != device);
    devices.push((device, operations));
}

/// Whether an operation's kernel on the device that this one without data stands for loses more
/// than one rounding of a low type.
pub fn is_inexact(device: DeviceId, operation: &str) -> bool {
    let devices = INEXACT.read();
    let found = devices.iter().find(|(known, _)| *known == device);
    found.is_some_and(|(_, operations)| operations.contains(&operation))
}
