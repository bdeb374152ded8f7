//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.
//!
//! | term | is, in the whole crate |
//! |---|---|
//! | rank | one member of a group: a thread or a process |
//! | group | [`ProcessGroup`]: the ranks that train together; the *world size* is their number |
//! | collective | a call that all ranks of a group make in the same order; its *label* names it in errors |
//! | communication thread | the one thread of a rank that runs its collectives, first in, first out |
//! | parameter | one trainable tensor of a module, known by its path |
//! | unit | parameters that are gathered and reduced together; in stages 0 to 2 the model is one unit |
//! | bucket | the elements that one collective carries |
//! | shard | the elements that a rank owns: of a bucket, of a parameter, of the model |
//! | partition | [`Partition`]: who owns what, `Flat` (equal cuts through parameters) or `Whole` (whole parameters) |
//! | gradient reducer | fills buckets with the gradients of backward and submits them to the communication thread |
//! | sampler | [`DistributedSampler`]: an order of all data for each epoch, of which each rank takes its part |
//! | step status | what ranks exchange after a step: batches left, learning rate, interruption |
//! | memory tracker | counts the bytes of gradients that a rank holds |
//! | record | saved training state: a directory of one manifest and one file per rank |
//! | manifest | the JSON file of a record that lists which tensor is in which rank's file |
//! | offload | optimizer state, and gradients and parameters if wanted, in host memory |
//!
//! # Ranks
//!
//! [`burn_ranks`] has [`ProcessGroup`] and its implementations [`SingleRank`], [`ThreadGroup`], for
//! estimates [`SimulatedRank`], and, with the feature `mpi`, `MpiGroup`. Its [`ShardMap`] computes
//! which rank owns which elements.
//!
//! `N` ranks train as one rank does on the union of their batches, to f32 rounding, for a model
//! that computes each item by itself. A `BatchNorm` normalises by its rank's batch, as in PyTorch,
//! and a loss between the items of a batch sees its rank's only; dropout draws other masks.
//!
//! Ranks that are processes are started by the cluster's own launcher, such as
//! `mpirun -n 4 program`, and find each other over MPI: `docs/zero.md` has the packages to install
//! and the commands.
//!
//! # Sharded training
//!
//! [`ReduceOverRanks`] makes a `burn_update::Update` one over ranks: its clipping and its optimizer
//! run on this rank's shard. [`ZeroSettings`] selects what is sharded. Two lines change in a
//! training program: the backend, `Sharded<Autodiff<..>>` (stage 2, [`Memory::Host`] and
//! [`with_seed`](RankReduction::with_seed) need it), and the optimizer.
//!
//! # Training in the Learner
//!
//! `update.strategy()` of an update with [`reduce_in_learner`](ReduceOverRanks::reduce_in_learner)
//! is a strategy for `SupervisedTraining::with_training_strategy`: ranks are threads of the
//! program, or one process each. With one rank it is Burn's training bit for bit. With several,
//! validation is shared, and rank 0 computes all metrics and writes Burn's ordinary records, from
//! which any number of ranks, or Burn alone, resumes. See `docs/zero.md`.
//!
//! # What happens to a gradient
//!
//! Under stage 2, with autocast outside and recomputation inside:
//!
//! ```text
//!                         a weight (f32 leaf)
//! forward   Autocast      cast to bf16
//!           Sharded       hook: an identity operation with the current depth of the graph
//!           Autodiff      records both
//!
//! backward  Autodiff      runs the deepest operations first: the hook runs after all later layers
//!           Sharded       was this the weight's last use in the graph?   no: add to the sum, go on
//!                              | yes: the gradient leaves the graph
//!                              v
//!           reducer       starts its copy to the host, flat
//!                              | a bucket is full, and all buckets before it were given
//!                              v                            (backward goes on meanwhile)
//!           communication a job: fill the bucket, reduce_scatter in f32, keep this rank's shard
//!           thread             | after the last bucket
//!                              v
//!           reducer       one small collective: which gradients exist, and which are non-finite, on any rank
//!                              |
//!                              v
//! step      scale         reads this rank's shards, unscaled, and asks all ranks: all skip, or none
//!           accumulate    adds shards up (windows of tokens: with the items of all ranks)
//!           reduce        clip and optimizer step on the shards; all_gather makes parameters of them
//! ```
//!
//! In stages 0 and 1 the hook passes the gradient on, and backward waits for no other rank. The
//! reduction happens in the step, once a window. Without accumulation all stages give the same bits
//! if gradients are sent in f32; with it stages 2 and 3 add up in another order. Loss scale and
//! accumulation combine over all ranks which gradients are non-finite, and then decide whether to
//! skip.
//!
//! A gradient whose parameter is used by another live graph too, such as that of a forward pass
//! without backward, leaves the graph at the end of the backward pass instead, with the same bits.
//!
//! # Records
//!
//! [`record`] saves the state of all ranks ([`save_sharded`]) and loads it at any number of ranks
//! ([`load_sharded`]); [`consolidate`] writes the model of a record into one ordinary file. A
//! [`Recorder`] saves and loads a whole training in one call: the model, the update with all its
//! parts, the scheduler.
//!
//! # Configuration
//!
//! [`DeepSpeedConfig`] is DeepSpeed's JSON, of which
//! [`Update::from_deepspeed`](FromDeepSpeed::from_deepspeed) makes an update, and [`ZeroConfig`]
//! what of it is about ranks; [`estimate()`] computes what a rank will hold and send, before
//! training.
//!
//! # Host offload
//!
//! [`OffloadedAdamW`] is AdamW with its state in host memory, for models whose Adam state does not
//! fit the device. With Adam an element of an f32 parameter takes 16 bytes on the device: itself,
//! its gradient and two moments. Offloaded it takes 4 to 8 on the device and 12 to 16 on the host,
//! for the master, the moments and the gradient. One rank is enough; in an update over ranks
//! each rank's host holds that rank's shard. [`HostAdamW`] is its arithmetic, on slices, and
//! [`PlacedAdamW`] is this optimizer or Burn's AdamW, by a setting.
//!
//! ```
//! use burn::{backend::Autodiff, nn, optim::{GradientsParams, Optimizer}, prelude::*};
//! use burn_zero::{HostAdamWConfig, OffloadConfig};
//!
//! type B = Autodiff<burn_flex::Flex>;
//! let device = Default::default();
//! let mut model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
//!
//! let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init()?; // AdamWConfig::new().init()
//! let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).square().mean();
//! let gradients = GradientsParams::from_grads(loss.backward(), &model);
//! model = optimizer.step(1e-3, model, gradients);
//! assert_eq!(optimizer.elements(), 4 * 3 + 3); // on the host
//! # let _ = model;
//! # Ok::<(), burn_zero::ZeroError>(())
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
//! The device then holds at most three buckets of gradients, and an element of an f32 parameter
//! takes 4 bytes there and 16 on the host: from the second backward pass on, or from the first
//! after [`OffloadedAdamW::prepare`]. Loss scale, accumulation and clipping compute on gradients
//! in host memory ([`WithHost`]). Parameters can be in host memory too, between their uses:
//! [`offload_parameters()`]. `docs/zero.md` has the cases of other backends and of several ranks
//! ([`Memory::Host`]).

mod backend;
mod config;
mod error;
mod estimate;
mod host;
mod offload;
mod parameters;
mod read_on_use;
pub mod record;
mod recorder;
mod reduce;
mod settings;
mod stack;
mod state;
mod tensor_file;
mod trace;
mod update;

pub use backend::{
    GradientPart, HostTensor, OfRank, PlacedTensor, Sharded, ShardedGradients, WithHost,
};
pub use burn_decorator::module::independent;
#[cfg(feature = "mpi")]
pub use burn_ranks::MpiGroup;
pub use burn_ranks::{
    BufferDtype, BufferLength, GroupFault, GroupOptions, HostBuffer, InvalidSetting, Partition,
    ProcessGroup, RanksError, ReduceOp, ShardMap, SimulatedRank, SingleRank, Split, ThreadGroup,
};
pub use burn_update::{
    BatchSums, DistributedSampler, EpochItems, EpochOfRank, RankItem, RankLoader, SampledLoader,
    SilentRenderer, SummedOutput, Tail,
};
pub use config::{
    BatchConfig, BatchSizes, DeepSpeedConfig, DeepSpeedParts, DeepSpeedPrecision, FromDeepSpeed,
    ZeroConfig,
};
pub use error::{ConfigFault, RecordFault, ShardingFault, ZeroError};
pub use estimate::{Estimate, ModelStates, estimate};
pub use offload::{
    AdamWState, Gradients, HostAdamW, HostAdamWConfig, OffloadConfig, OffloadRecord,
    OffloadedAdamW, ParamsOut, PlacedAdamW,
};
pub use parameters::offload_parameters;
pub use read_on_use::read_on_use;
pub use record::{consolidate, consolidate_as, load_sharded, save_sharded};
pub use recorder::{Recorder, Training};
pub use settings::{Memory, Stage, ZeroSettings};
pub use tensor_file::TensorFile;
pub use update::{ParameterShards, RankReduction, ReduceOverRanks, shard_parameters};

/// Types of modules and records, public because Burn's traits require it; programs need not name
/// them.
pub mod parts {
    pub use crate::offload::{EntryItem, PlacedRecord, StateItem};
    pub use crate::update::ParameterShard;
}
