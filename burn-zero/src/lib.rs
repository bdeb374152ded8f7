//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.
//!
//! # Ranks
//!
//! [`group`] holds the ranks: [`ProcessGroup`] and its members [`SingleRank`], [`ThreadGroup`] and, with the feature
//! `mpi`, `MpiGroup`. [`shard`] says which rank owns which elements: [`ShardMap`], integers only.

mod backend;
mod error;
pub mod group;
mod host;
mod optimizer;
mod reduce;
pub mod shard;
mod sharding;

pub use backend::{Sharded, ShardedGradients, Tape};
pub use error::ZeroError;
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, ThreadGroup,
};
pub use optimizer::{Piece, Shards, ZeroOptimizer};
pub use shard::{Partition, ShardMap};
pub use sharding::{Sharding, ShardingError, Stage};

/// Where a trait leaves no other way to fail.
fn raise<T>(result: Result<T, ZeroError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
