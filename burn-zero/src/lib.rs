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
//!
//! # Configuration
//!
//! [`ZeroConfig`] reads DeepSpeed's JSON as users have it; [`estimate()`] says what a rank will hold and send, before training.
//!
//! # Host offload
//!
//! [`HostAdamW`] keeps moments and f32 parameters in host memory and updates them there.

mod config;
mod error;
mod estimate;
pub mod group;
mod offload;
pub mod record;
pub mod shard;
mod stage;

pub use config::{
    AdagradParams, AdamParams, BatchConfig, BatchSizes, CommunicationDtype, ConfigError,
    IgnoredKey, LossScaling, OptimizerConfig, OptimizerOffload, Precision, ResolvedConfig,
    SchedulerConfig, SgdParams, Warmup, WarmupShape, ZeroConfig,
};
pub use error::ZeroError;
pub use estimate::{Estimate, EstimateTable, ModelStates, StateLayout, estimate};
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    Agree, GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, Split,
    ThreadGroup,
};
pub use offload::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostAdamWError,
    InstructionSet, OpenStep, ParamsOut,
};
pub use record::{RecordError, consolidate, load_sharded, save_sharded};
pub use shard::ShardMap;
pub use stage::Stage;
