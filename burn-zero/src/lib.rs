//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.
//!
//! # Ranks
//!
//! [`group`] holds the ranks: [`ProcessGroup`] and its members [`SingleRank`], [`ThreadGroup`] and, with the feature
//! `mpi`, `MpiGroup`. [`shard`] says which rank owns which elements: [`ShardMap`], integers only.

mod error;
pub mod group;
pub mod shard;

pub use error::ZeroError;
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, ThreadGroup,
};
pub use shard::ShardMap;
