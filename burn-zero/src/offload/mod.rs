//! Optimizer state in host memory.
//!
//! `host_adamw` is AdamW's arithmetic, on slices. `adamw` is the optimizer of modules on top of it: `pipeline` overlaps its downloads,
//! updates and uploads, `record` saves its state. `any` puts any other optimizer of Burn on a backend of the host. Both use
//! `parameters`, which reads and updates the parameters of a module; `gradients`, which copies gradients to the host during backward; and
//! `shards`, which passes shards between them and a [`ZeroOptimizer`](crate::ZeroOptimizer) around them.

mod adamw;
mod any;
mod config;
mod error;
mod gradients;
mod host_adamw;
mod parameters;
mod pipeline;
mod record;
mod shards;

pub use adamw::OffloadedAdamW;
pub use any::{HostOffload, HostRecord, offload};
pub use config::OffloadConfig;
pub use error::OffloadError;
pub use host_adamw::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, InstructionSet,
    ParamsOut,
};
pub(crate) use parameters::leaf_node;
pub use record::{EntryItem, OffloadRecord, Ranked, StateItem};
pub(crate) use shards::{HostShards, step_on_shards};

/// Panics with the message of an error, because the signature of a step has no error.
fn raise<T>(result: Result<T, OffloadError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
