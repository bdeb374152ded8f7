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

#[path = "../../../burn-checkpoint/src/budget/mod.rs"]
mod budget;
mod decorator;
#[path = "../../../burn-checkpoint/src/error.rs"]
mod error;
#[path = "../../../burn-checkpoint/src/host/mod.rs"]
mod host;
#[path = "../../../burn-checkpoint/src/node/mod.rs"]
mod node;

#[path = "."]
mod observe {
    #[path = "../../../burn-checkpoint/src/observe/snapshot.rs"]
    pub mod snapshot;
    #[path = "../../../burn-checkpoint/src/observe/stats.rs"]
    pub(crate) mod stats;
    #[path = "../../../burn-checkpoint/src/observe/trace.rs"]
    pub mod trace;
}
#[path = "../../../burn-checkpoint/src/record/mod.rs"]
mod record;

#[path = "."]
mod scope {
    #[path = "../../../burn-checkpoint/src/scope/checkpoint.rs"]
    pub(crate) mod checkpoint;
    #[path = "../../../burn-checkpoint/src/scope/listed_tensors.rs"]
    pub(crate) mod listed_tensors;
    #[path = "outputs.rs"]
    pub(crate) mod outputs;
    #[path = "../../../burn-checkpoint/src/scope/policy.rs"]
    pub(crate) mod policy;
    #[path = "../../../burn-checkpoint/src/scope/region.rs"]
    pub(crate) mod region;
    #[path = "../../../burn-checkpoint/src/scope/tiny.rs"]
    pub(crate) mod tiny;
    #[path = "../../../burn-checkpoint/src/scope/units.rs"]
    pub(crate) mod units;
}

pub use budget::MemoryBudget;
pub use budget::in_force::{Apart, apart};
pub use budget::install::InstalledBudget;
pub use decorator::Remat;
pub use error::RematError;
pub use node::handle::{Handle, Managed};
pub use node::replay::is_replaying;
pub use observe::stats::RematStats;
pub use observe::{snapshot, trace};
pub use record::op::{OpInfo, op_table};
pub use record::work::Work;
pub use scope::checkpoint::{checkpoint, checkpoint_labelled, checkpoint_with, evict};
pub use scope::outputs::{Outputs, touched};
pub use scope::policy::{OpCall, PerOperation, Policy, SavePolicy};

/// The kinds of tensors.
pub mod kinds {
    pub use crate::node::kind::{Bool, Float, Int, Kind, Quant, Value};
}
