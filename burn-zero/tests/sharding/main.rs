//! Laws of sharded training, on threads.

mod agreement;
mod bytes;
mod missing;
mod parity;
mod refusals;
mod state;
mod support;
