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
//! # Sharded training
//!
//! [`ZeroOptimizer`] runs one of Burn's optimizers on this rank's shard; [`ZeroSettings`] says what is sharded. Two lines change
//! in a training program: the backend, `Sharded<Autodiff<..>>` (stage 2, [`Memory::Host`] and
//! [`with_seed`](ZeroOptimizer::with_seed) need it), and the optimizer.
//!
//! # Training in the Learner
//!
//! [`ZeroStrategy`] is a strategy for `SupervisedTraining::with_training_strategy`: ranks are threads of the program, or one
//! process a rank. With one rank it is Burn's training bit for bit; with several, validation is shared, rank 0 computes all metrics
//! and writes Burn's ordinary records, which any number of ranks and Burn alone go on with. `docs/zero.md` describes it.
//!
//! # What happens to a gradient
//!
//! Under stage 2, with autocast outside and recomputation inside:
//!
//! ```text
//!                         a weight (f32 leaf)
//! forward   Autocast      cast to bf16
//!           Sharded       hook: an operation that does nothing, as deep as the graph is by now
//!           Autodiff      records both
//!
//! backward  Autodiff      runs the deepest operations first: the hook's turn comes when all later layers are done
//!           Sharded       was this the weight's last use in the graph?   no: add up, go on
//!                              | yes: it leaves the graph
//!                              v
//!                         copy to the host, flat, into the buckets of its elements
//!                              | a bucket is full, and those before it are under way
//!                              v                            (backward goes on meanwhile)
//!           group         its communication thread: reduce_scatter, added up over ranks in f32; this rank keeps its part
//!                              | after the last bucket
//!                              v
//!                         which gradients there are on any rank, which are non-finite on any rank
//!                              |
//!                              v
//! step      GradScaler    reads this rank's pieces, unscaled: all ranks skip, or none
//!           MultiSteps    adds pieces up (windows of tokens: with the items of all ranks)
//!           ZeroOptimizer the wrapped optimizer steps on the pieces; all_gather makes parameters of them
//! ```
//!
//! In stages 0 and 1 the hook lets the gradient pass, so that all stages compute the same bits: backward waits for no other rank. The
//! rest happens in the step, once a window; a loss scaler and an accumulation ask all ranks which gradients are non-finite.
//!
//! A gradient that waits for a use in another graph, such as that of a forward pass without backward, leaves at the end of
//! the backward pass instead: later, and the same.
//!
//! # Records
//!
//! [`record`] saves the state of all ranks and loads it at any number of them: [`save_sharded`], [`load_sharded`];
//! [`consolidate`] makes one ordinary file of it, [`inspect`](record::inspect) lists what there is. A [`Recorder`] does both with a
//! whole training: the model, the optimizer with all its layers, the scheduler, in one call.
//!
//! # Configuration
//!
//! [`ZeroConfig`] reads DeepSpeed's JSON as users have it; [`estimate()`] says what a rank will hold and send, before training.
//!
//! # Host offload
//!
//! [`OffloadedAdamW`] is AdamW with its state in host memory, for models whose Adam state does not fit the device. An f32
//! parameter takes 16 bytes there with Adam: itself, its gradient and two moments. Offloaded it takes 4 to 8, and the host 12 to 16,
//! for the master, the moments and the gradient. No other rank is needed; inside of a [`ZeroOptimizer`] each rank's host holds that rank's
//! part. [`HostAdamW`] is its arithmetic, on slices. [`offload()`] puts any other optimizer of Burn on the host.
//!
//! ```
//! use burn::{backend::Autodiff, nn, optim::{GradientsParams, Optimizer}, prelude::*};
//! use burn_zero::{HostAdamWConfig, OffloadConfig};
//!
//! type B = Autodiff<burn_flex::Flex>;
//! let device = Default::default();
//! let mut model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
//!
//! let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init::<B>()?; // AdamWConfig::new().init()
//! let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).square().mean();
//! let gradients = GradientsParams::from_grads(loss.backward(), &model);
//! model = optimizer.step(1e-3, model, gradients);
//! assert_eq!(optimizer.elements(), (4 * 3 + 3, 0)); // on the host, on the device
//! # let _ = model;
//! # Ok::<(), burn_zero::OffloadError>(())
//! ```
//!
//! What moves when, on a [`Sharded`] backend, with time going to the right:
//!
//! ```text
//!            backward                            step
//! device     l4    l3    l2    l1
//! down             g4    g3    g2    g1                          bucket by bucket, in their own type
//! update                                         p1   p2   p3   p4       all cores: master and moments
//! up                                                  p1   p2   p3   p4  parameters come back in their own type
//! ```
//!
//! So the device holds about a bucket of gradients, and an f32 parameter takes 4 bytes there, and 16 on the host: from the second
//! backward pass on, or the first if the optimizer was shown the model ([`OffloadedAdamW::prepare`]). Gradients that are on the host
//! stay there ([`WithHost`]): a loss scaler looks at them, accumulation adds them up and clipping scales them in host memory. Inside of
//! a [`ZeroOptimizer`] that is [`Memory::Host`]: also what the ranks have reduced then stays where it is
//! updated. On another backend gradients stay on the device until the step, and its downloads overlap with updates.
//!
//! At most [`staging`](OffloadConfig::staging) parameters are on their way. Whether a step is taken is decided before, by
//! the loss scaler: a step that is skipped does not begin, and leaves the host as it was, bit for bit.

mod backend;
mod config;
mod error;
mod estimate;
pub mod group;
mod host;
mod module;
mod offload;
mod optimizer;
pub mod record;
mod recorder;
mod reduce;
mod settings;
pub mod shard;
mod stage;
mod state;
mod strategy;

pub use backend::{HostTensor, PlacedTensor, Sharded, ShardedGradients, Tape, WithHost};
pub use config::{
    AdagradParams, AdamParams, AutoValues, BatchConfig, BatchSizes, ConfigError, IgnoredKey,
    LossScaling, OptimizerConfig, OptimizerOffload, Precision, ResolvedConfig, SchedulerConfig,
    SgdParams, Stage3Config, Warmup, WarmupShape, ZeroConfig,
};
pub use error::ZeroError;
pub use estimate::{Estimate, EstimateTable, ModelStates, StateLayout, estimate, estimate_map};
#[cfg(feature = "mpi")]
pub use group::MpiGroup;
pub use group::{
    Agree, GroupFault, GroupOptions, HostBuffer, ProcessGroup, ReduceOp, SingleRank, Split,
    ThreadGroup,
};
pub use offload::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostOffload,
    HostRecord, InstructionSet, OffloadConfig, OffloadError, OffloadRecord, OffloadedAdamW,
    ParamsOut, offload,
};
pub use optimizer::{ParameterShards, ZeroOptimizer, ZeroOptimizerError, independent};
pub use record::{RecordError, consolidate, load_sharded, save_sharded};
pub use recorder::{Recorder, Training};
pub use settings::{Memory, ZeroSettings};
pub use shard::{Partition, ShardMap};
pub use stage::Stage;
pub use state::tensor_bytes;
pub use strategy::{Loaders, RankItem, SilentRenderer, StrategyError, Uneven, ZeroStrategy};

/// What Burn's traits make public and nobody names: what modules and records are made of.
pub mod parts {
    pub use crate::offload::{EntryItem, Ranked, StateItem};
    pub use crate::optimizer::{ParameterShard, ShardOptimizer};
}

/// Where a trait leaves no other way to fail.
fn raise<T>(result: Result<T, ZeroError>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}
