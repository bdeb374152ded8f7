//! `burn-checkpoint` for Burn 0.22.1: the engine by path, over burn-backend alone.
//!
//! burn-dispatch depends on this crate, so it knows no `Tensor`: `burn-decorated` has what takes
//! one. Its own are `outputs.rs` and `decorator/backend.rs`.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "the shared sources have more than is used here"
)]

#[path = "../../../burn-checkpoint/src/again.rs"]
mod again;
#[path = "../../../burn-checkpoint/src/ahead.rs"]
mod ahead;
#[path = "../../../burn-checkpoint/src/budget/mod.rs"]
mod budget;
#[path = "../../../burn-checkpoint/src/call/mod.rs"]
mod call;
#[path = "../../../burn-checkpoint/src/clock.rs"]
mod clock;
#[path = "../../../burn-checkpoint/src/context.rs"]
mod context;
#[path = "../../../burn-checkpoint/src/cost.rs"]
mod cost;
mod decorator;
#[path = "../../../burn-checkpoint/src/delivered.rs"]
mod delivered;
#[path = "../../../burn-checkpoint/src/download.rs"]
mod download;
#[path = "../../../burn-checkpoint/src/entry.rs"]
mod entry;
#[path = "../../../burn-checkpoint/src/error.rs"]
mod error;
#[path = "../../../burn-checkpoint/src/extent.rs"]
mod extent;
#[path = "../../../burn-checkpoint/src/gradient.rs"]
mod gradient;
#[path = "../../../burn-checkpoint/src/handle.rs"]
mod handle;
#[path = "../../../burn-checkpoint/src/host_copy.rs"]
mod host_copy;
#[path = "../../../burn-checkpoint/src/install.rs"]
mod install;
#[path = "../../../burn-checkpoint/src/kind.rs"]
mod kind;
#[path = "../../../burn-checkpoint/src/listed_tensors.rs"]
mod listed_tensors;
#[path = "../../../burn-checkpoint/src/memory.rs"]
mod memory;
#[path = "../../../burn-checkpoint/src/node.rs"]
mod node;
#[path = "../../../burn-checkpoint/src/op.rs"]
mod op;
mod outputs;
#[path = "../../../burn-checkpoint/src/policy.rs"]
mod policy;
#[path = "../../../burn-checkpoint/src/prefetch.rs"]
mod prefetch;
#[path = "../../../burn-checkpoint/src/products.rs"]
mod products;
#[path = "../../../burn-checkpoint/src/recipe.rs"]
mod recipe;
#[path = "../../../burn-checkpoint/src/recorded.rs"]
mod recorded;
#[path = "../../../burn-checkpoint/src/region.rs"]
mod region;
#[path = "../../../burn-checkpoint/src/replay.rs"]
mod replay;
#[path = "../../../burn-checkpoint/src/request.rs"]
mod request;
#[path = "../../../burn-checkpoint/src/scope.rs"]
mod scope;
#[path = "../../../burn-checkpoint/src/snapshot.rs"]
pub mod snapshot;
#[path = "../../../burn-checkpoint/src/stack.rs"]
mod stack;
#[path = "../../../burn-checkpoint/src/stats.rs"]
mod stats;
#[path = "../../../burn-checkpoint/src/tiny.rs"]
mod tiny;
#[path = "../../../burn-checkpoint/src/trace.rs"]
pub mod trace;
#[path = "../../../burn-checkpoint/src/unwound.rs"]
mod unwound;
#[path = "../../../burn-checkpoint/src/verify.rs"]
mod verify;
#[path = "../../../burn-checkpoint/src/work.rs"]
mod work;

pub use budget::MemoryBudget;
pub use decorator::Remat;
pub use error::RematError;
pub use handle::{Handle, Managed};
pub use install::{InstalledBudget, ProcessBudget};
pub use op::{OpInfo, op_table};
pub use outputs::{Outputs, touched};
pub use policy::{OpCall, PerOperation, Policy, SavePolicy};
pub use replay::is_replaying;
pub use scope::{checkpoint, checkpoint_labelled, checkpoint_with, evict};
pub use stats::RematStats;
pub use verify::Verify;
pub use work::Work;

/// The kinds of tensors.
pub mod kinds {
    pub use crate::kind::{Bool, Float, Int, Kind, Quant, Value};
}
