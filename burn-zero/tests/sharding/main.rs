//! Laws of sharded training, on threads.

mod agreement;
mod bytes;
mod compose;
mod missing;
mod offload;
mod parity;
mod refusals;
mod state;
mod support;
