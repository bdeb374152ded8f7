//! Optimizer state in host memory.
//!
//! `host_adamw` is the arithmetic, on slices; `adamw` brings modules to it. `backend` brings modules to any of Burn's
//! optimizers, on a backend of the host. `landing` brings both their gradients while backward goes on, `uploads` keeps
//! updated pieces there for the other ranks.

mod adamw;
mod arrivals;
mod backend;
mod config;
mod error;
mod host_adamw;
mod landing;
mod leaves;
mod marks;
mod uploads;

pub use adamw::{EntryItem, OffloadRecord, OffloadedAdamW, Ranked, StateItem};
pub use backend::{HostOffload, HostRecord, offload};
pub use config::OffloadConfig;
pub use error::OffloadError;
pub use host_adamw::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostAdamWError,
    InstructionSet, OpenStep, ParamsOut,
};
pub(crate) use uploads::{Kept, gathered_after};

/// A step has no other way to fail.
fn raise<T>(result: Result<T, OffloadError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
