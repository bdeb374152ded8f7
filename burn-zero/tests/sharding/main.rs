//! Laws of sharded training, on threads.

mod agreement;
mod bytes;
mod compose;
mod interrupted;
mod missing;
mod offload;
mod parity;
mod recorder;
mod refusals;
mod support;
mod tied;
mod tokens;
