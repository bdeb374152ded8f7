//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.
//!
//! # Ranks
//!
//! [`group`] holds the ranks: [`ProcessGroup`] and its members [`SingleRank`], [`ThreadGroup`] and, with the feature
//! `mpi`, `MpiGroup`. [`shard`] says which rank owns which elements: [`ShardMap`], integers only.
//!
//! Ranks that are processes are started by the cluster's own launcher; nothing else is needed to find each other:
//!
//! | MPI | Debian packages, with `libclang-dev clang` to build | build | start |
//! |---|---|---|---|
//! | Open MPI | `libopenmpi-dev openmpi-bin` | `cargo build --features mpi` | `mpirun -n 4 program`, `srun -n 4 --mpi=pmix program` |
//! | MPICH | `libmpich-dev mpich` | `MPICC=mpicc.mpich cargo build --features mpi` | `mpirun.mpich -n 4 program`, `srun -n 4 --mpi=pmi2 program` |
//!
//! Open MPI refuses to start as root without `--allow-run-as-root`, and more ranks than cores without `--oversubscribe`.
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
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    Agree, GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, Split,
    ThreadGroup,
};
pub use record::{RecordError, consolidate, load_sharded, save_sharded};
pub use shard::ShardMap;
