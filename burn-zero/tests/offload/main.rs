//! Laws of offloaded optimizers.

mod parity;
mod support;
