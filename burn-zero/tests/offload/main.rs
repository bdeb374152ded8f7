//! Laws of offloaded optimizers.

mod changes;
#[path = "../golden/mod.rs"]
mod golden;
mod host_tensors;
mod layers;
mod parity;
mod placed;
mod record;
mod refusals;
mod support;
