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
//! the same as without eviction; with [`Policy::Offload`] to f32 rounding, where a backend chooses
//! its kernel by the order of elements in memory.
//!
//! # What happens to a tensor
//!
//! ```text
//!             an operation in a scope or under a budget (record/)
//!                                     |
//!                result with recipe,  |  or alone: random numbers, data, ...
//!                                     v
//!                          +---------------------+
//!      Handle --counted--> | Node                |     Node of an input
//! (the user's, autodiff's  |   meta: shape, ...  |     +--------------+
//!  tape's)                 |   content: recipe --|---> |  ...         |
//!                          +---------------------+ not +--------------+
//!                                                 counted
//!
//! content: Kept(value)                  no recipe; or a scope keeps it, or it outlived its step
//!          Recorded(value, recipe)      evicted without value: the scope ends (scope/), the budget
//!                                       needs room (budget/), the last handle goes
//!          Hosted(value, copy)          `Offload`: in host memory (host/), uploaded for its use
//!          Delivered(value, recipe)     a parameter in host memory: there during uses only
//!          Gone                         taken by its last user
//!
//! The tensor is used (node/replay.rs): its inputs come back, its operation runs again; what no
//! handle refers to goes right after.
//! ```
//!
//! A [`Handle`] is the tensor of `Remat`: the inner backend's own, which passes through at next to
//! no cost where there is no scope and no budget, or a reference to a *node*, the record of a
//! managed tensor. A node's *meta* never changes: shape, type, device. Its *content* is the tensor,
//! which may be evicted and restored, and how it comes back. A *recipe* is the operation with its
//! input handles, and is dropped when no replay can need it. Autodiff's tape holds handles, so
//! backward brings tensors back by using them: no nested backward pass, no hook, no annotation.
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
//! # Where what is
//!
//! | folder | what |
//! |---|---|
//! | `node` | a handle, its node and the node's recipe: how a tensor comes back |
//! | `record` | recording an operation: what its result takes from its operands, and what it costs |
//! | `scope` | scopes, their policies and their results |
//! | `budget` | what is evicted when memory is short |
//! | `host` | copies in host memory, and parameters that are delivered from there |
//! | `observe` | counters, traces, snapshots |
//! | `decorator` | `Remat` from the table of operations |

mod budget;
mod decorator;
mod error;
mod host;
mod node;
mod observe;
mod record;
mod scope;

pub use budget::MemoryBudget;
pub use budget::in_force::{Apart, apart};
pub use budget::install::{InstalledBudget, end_step};
pub use burn_decorator::module::independent;
pub use burn_decorator::profile::{DeviceProfile, LinkProfile, LinkedMemory};
pub use decorator::Remat;
pub use error::{Need, OpResult, RematError};
pub use host::ahead::{UploadOrder, UploadPlace};
pub use host::delivered::{
    Delivery, delivered, delivered_in_order, delivered_in_types, is_delivered, upload_place,
};
pub use host::download::ReadsInPlace;
pub use node::drops::Held;
pub use node::gradient::Gradient;
pub use node::handle::{Handle, Managed};
pub use node::replay::is_replaying;
pub use observe::metric::{HoldersMetric, RematMetric};
pub use observe::parameters::name_parameters;
pub use observe::record_all::{FullRecording, record_all};
pub use observe::stats::RematStats;
pub use observe::{snapshot, trace};
pub use record::context::{Recorder, recorder, unrecorded};
pub use record::op::{OpInfo, op_table};
pub use record::work::Work;
pub use scope::checkpoint::{
    checkpoint, checkpoint_labelled, checkpoint_listing, checkpoint_with, evict, keeping,
};
pub use scope::checkpoint_units::{
    CheckpointedUnits, UnitsOptimizer, checkpoint_units, checkpoint_units_by,
};
pub use scope::listed_tensors::ListedTensors;
pub use scope::module::Checkpointed;
pub use scope::outputs::Outputs;
pub use scope::parameter_unit::ParameterUnit;
pub use scope::policy::{OpCall, PerOperation, Policy, SavePolicy};
pub use scope::sequential::checkpoint_sequential;

/// The kinds of tensors.
pub mod kinds {
    pub use crate::node::kind::{Bool, Float, Int, Kind, Quant, Value};
}
