//! Laws of offloaded optimizers.

mod backend;
mod changes;
mod layers;
mod parity;
mod record;
mod refusals;
mod support;
