//! Laws of sharded training, on threads.

mod parity;
mod support;
