//! Optimizer state in host memory.
//!
//! `host_adamw` is AdamW's arithmetic, on slices. `adamw` is the optimizer of modules on top of it,
//! `host_state` a parameter's state and its record. `adamw` uses `parameters`, which reads and
//! updates the parameters of a module, copies gradients to the host during backward, and passes
//! shards to a [reduction](crate::ReduceOverRanks) around it. `placed` is this optimizer or
//! Burn's AdamW, as one type.

mod adamw;
mod config;
mod host_adamw;
mod host_state;
mod parameters;
mod placed;

pub use adamw::OffloadedAdamW;
use config::not_negative;
pub use config::{HostAdamWConfig, OffloadConfig};
pub use host_adamw::{AdamWState, Gradients, HostAdamW, ParamsOut};
pub use host_state::{EntryItem, OffloadRecord, StateItem};
pub(crate) use parameters::{HostShards, step_on_shards};
pub use placed::{PlacedAdamW, PlacedRecord};
