//! Activation recomputation for Burn: a tensor that is not resident knows how to come back.
//!
//! ```
//! use burn::backend::Autodiff;
//! use burn::tensor::Tensor;
//! use burn_checkpoint::{Remat, RematStats, checkpoint};
//! use burn_flex::Flex;
//!
//! type B = Autodiff<Remat<Flex>>; // the only line that changes
//!
//! let x = Tensor::<B, 2>::ones([64, 64], &Default::default()).require_grad();
//! let y = checkpoint(|| x.clone().exp().sin().cos()); // only `y` stays
//! assert_eq!(RematStats::of_thread().evicted_operations, 2);
//! let grads = y.sum().backward(); // brings back what it uses
//! assert!(x.grad(&grads).is_some());
//! ```
//!
//! Tensors are evicted at the end of a scope ([`checkpoint`], [`checkpoint_with`] a [`Policy`]), or
//! to keep a byte limit, without annotations ([`MemoryBudget`]). Loss and gradients are bit for bit
//! the same as without eviction.
//!
//! # What happens to a tensor
//!
//! ```text
//!                         an operation in a scope or under a budget (call/)
//!                                            |
//!                       result + recipe, or  |  result alone: random numbers, data, ...
//!                                            v
//!                                  +--------------------+
//!              Handle --counted--> | Node               |        Node of an input
//!        (the user's, autodiff's   |   meta: shape, ... |       +----------------+
//!         tape's)                  |   recipe ----------|-----> |  ...           |
//!                                  |   state            |  not  +----------------+
//!                                  +---------|----------+ counted
//!                                            v
//!           +---------------- storage: Resident <--------------+
//!           |                           |      |               |
//!           | the scope ends, or        |      | Offload       | the tensor is used (replay.rs):
//!           | the budget needs room     |      v               |   its inputs come back, its operation runs again;
//!           | (scope.rs, budget/)       |  Host copy --upload->|   what no handle refers to goes right after
//!           v                           |                      |
//!        Evicted -----------------------|----replay------------+
//!                                       v
//!                          the last handle goes: storage is dropped at once,
//!                          the recipe stays for the recipes of others
//! ```
//!
//! A [`Handle`] is the tensor of `Remat`: the inner backend's own, which passes through at next to
//! no cost where there is no scope and no budget, or a reference to a *node*, the record of a
//! managed tensor. A node's *meta* never changes: shape, type, device, bytes. Its *storage* may be
//! evicted and restored. Its *recipe* is the operation with its input handles, and is dropped when
//! no replay can need it. Autodiff's tape holds handles, so backward brings tensors back by using
//! them: no nested backward pass, no hook, no annotation.
//!
//! - Under a budget a gradient, and a constant that backward makes, such as zeros, is never
//!   computed again: its handle has the tensor, and the budget counts the bytes. It is a node where
//!   it may move to the host, in a scope, where it has to be found by its operation, in a trace or
//!   by a budget that retries, and if it is one of several results.
//! - A tensor that is [`delivered()`] has storage during its uses only, and so do views and casts
//!   of it, in and outside of scopes.
//! - A tensor that cannot be computed again keeps its storage as long as a handle or a recipe
//!   refers to it.
//! - An operation that is the last to use a tensor gets its buffer, so backends still write in
//!   place.
//! - Views share one storage with the tensor they are views of: its bytes are counted once, and
//!   evicting it evicts all of them.
//! - A replay plans first and runs then; neither it nor a drop recurses, however long the chain.
//!
//! The *work* column of `burn-decorator`'s table says which operations are recorded: [`op_table`]
//! lists them, `docs/operations.md` is printed from it.
//!
//! # Layers
//!
//! A file imports only from layers above its own in this table:
//!
//! | layer | files | what |
//! |---|---|---|
//! | work and clock | `work`, `op`, `products`, `cost`, `clock` | what an operation costs; the operation count, forward or backward |
//! | values | `kind`, `error`, `stack`, `trace`, `stats`, `unwound`, `verify`, `request`, `snapshot` | tensors of the inner backend, what panics drop, errors, events, counters, checksums, tensors that are asked for, what holds the memory |
//! | region | `policy`, `region` | what a scope does with its tensors; a scope as its tensors refer to it |
//! | entry | `entry`, `tiny` | a node as scopes and budgets see it, of any backend |
//! | budget | `budget` | what is evicted when memory is short |
//! | memory | `prefetch`, `download`, `host_copy`, `ahead`, `memory`, `gradient` | host copies, how they are read and their order; uploads of delivered tensors before their use; a device's counters, with the budget that they are under; the mark of a gradient, whose bytes these count |
//! | node | `node`, `recipe` | meta, storage and recipe of a managed tensor |
//! | replay | `replay`, `recorded` | bringing a node back; the node with its recipe |
//! | context | `context`, `install` | a thread's open scopes, budget in force (its own or the process's), counters |
//! | handle | `handle`, `outputs`, `listed_tensors`, `scope`, `call`, `delivered` | the tensor of `Remat`; the ends of scopes; recording an operation; tensors that are there during their uses |
//! | backend | `decorator` | `Remat` from the table of operations |
//! | tools | `sequential`, `module`, `plot`, `parameters`, `record_all`, `metric` | what is built on the public API |

mod again;
mod ahead;
mod budget;
mod call;
mod clock;
mod context;
mod cost;
mod decorator;
mod delivered;
mod download;
mod entry;
mod error;
mod extent;
mod gradient;
mod handle;
mod host_copy;
mod install;
mod kind;
mod listed_tensors;
mod memory;
mod metric;
mod module;
mod node;
mod op;
mod outputs;
mod parameters;
#[cfg(feature = "plot")]
pub mod plot;
mod policy;
mod prefetch;
mod products;
mod recipe;
mod record_all;
mod recorded;
mod region;
mod replay;
mod request;
mod scope;
mod sequential;
pub mod snapshot;
mod stack;
mod stats;
mod tiny;
pub mod trace;
mod unwound;
mod verify;
mod work;

pub use ahead::{UploadOrder, UploadPlace};
pub use budget::MemoryBudget;
pub use burn_decorator::module::independent;
pub use burn_decorator::profile::{DeviceProfile, LinkProfile, LinkedMemory};
pub use context::{Recorder, recorder};
pub use decorator::Remat;
pub use delivered::{
    Delivery, delivered, delivered_in_order, delivered_in_types, is_delivered, upload_place,
};
pub use download::ReadsInPlace;
pub use error::{Need, OpResult, RematError};
pub use gradient::Gradient;
pub use handle::{Handle, Managed};
pub use install::{InstalledBudget, ProcessBudget, end_step};
pub use listed_tensors::ListedTensors;
pub use metric::{HoldersMetric, RematMetric};
pub use module::Checkpointed;
pub use op::{OpInfo, op_table};
pub use outputs::Outputs;
pub use parameters::name_parameters;
pub use policy::{OpCall, PerOperation, Policy, SavePolicy};
pub use record_all::{FullRecording, record_all};
pub use replay::is_replaying;
pub use scope::{
    checkpoint, checkpoint_labelled, checkpoint_listing, checkpoint_with, evict, keeping,
};
pub use sequential::checkpoint_sequential;
pub use stats::RematStats;
pub use unwound::Held;
pub use verify::Verify;
pub use work::Work;

/// The kinds of tensors.
pub mod kinds {
    pub use crate::kind::{Bool, Float, Int, Kind, Quant, Value};
}
