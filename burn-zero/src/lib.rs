//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.
//!
//! # Ranks
//!
//! [`group`] holds the ranks: [`ProcessGroup`] and its members [`SingleRank`], [`ThreadGroup`] and, with the feature
//! `mpi`, `MpiGroup`. [`shard`] says which rank owns which elements: [`ShardMap`], integers only.
//!
//! # Records
//!
//! [`record`] saves the state of all ranks and loads it at any number of them: [`save_sharded`], [`load_sharded`];
//! [`consolidate`] makes one ordinary file of it, [`inspect`](record::inspect) lists what there is.

mod error;
pub mod group;
pub mod record;
pub mod shard;

pub use error::ZeroError;
pub use group::{GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, ThreadGroup};
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use record::{RecordError, consolidate, load_sharded, save_sharded};
pub use shard::ShardMap;
