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
//! Who evicts is a choice: the end of a scope ([`checkpoint`], [`checkpoint_with`] a [`Policy`]), or a byte limit and no
//! annotation at all ([`MemoryBudget`]). Loss and gradients are bit for bit those without any of it.
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
//!        (the user's, autodiff's   |   head: shape, ... |       +----------------+
//!         tape's)                  |   recipe ----------|-----> |  ...           |
//!                                  |   state            |  not  +----------------+
//!                                  +---------|----------+ counted
//!                                            v
//!           +---------------- storage: Resident <--------------+
//!           |                           |      |               |
//!           | the scope ends, or        |      | Offload       | somebody uses the tensor (replay.rs):
//!           | the budget needs room     |      v               |   its inputs come back, its operation runs again;
//!           | (scope.rs, budget/)       |  Host copy --upload->|   what no handle refers to goes right after
//!           v                           |                      |
//!        Evicted -----------------------|----replay------------+
//!                                       v
//!                          the last handle goes: storage is dropped at once,
//!                          the recipe stays for the recipes of others
//! ```
//!
//! A [`Handle`] is what `Remat` calls a tensor: the inner backend's own, which passes through at next to no cost where there is no
//! scope and no budget, or a reference to a node. A node's *head* never changes: shape, type, device, bytes, who counts them.
//! Its *storage* comes and goes. Its *recipe* is the operation with its input handles, and is
//! dropped as soon as nobody can need it. Autodiff's tape holds handles, so backward brings tensors back by using them: no
//! nested backward pass, no hook, nothing to annotate.
//!
//! - What cannot be computed again keeps its storage as long as anybody refers to it, recipes included.
//! - An operation that is the last to use a tensor gets its buffer, so backends still write in place.
//! - Views count the bytes of what they are views of, once; evicting a storage is evicting all of its views.
//! - A replay plans first and runs then; neither it nor a drop recurses, however long the chain.
//!
//! Which operations are recorded says the *work* column of `burn-decorator`'s table: [`op_table`] lists them, `docs/operations.md`
//! is printed from it.

mod budget;
mod call;
mod chain;
mod context;
mod decorator;
mod error;
mod handle;
mod host;
mod kind;
mod ledger;
mod linear_cross_entropy;
mod metric;
mod node;
mod op;
mod outputs;
pub mod plan;
#[cfg(feature = "plot")]
pub mod plot;
mod policy;
mod recipe;
mod replay;
mod scope;
mod stack;
mod stats;
mod tiny;
mod totals;
pub mod trace;
mod verify;

pub use budget::{InstalledBudget, MemoryBudget};
pub use chain::{checkpoint_chain, profile_chain, profile_tail};
pub use decorator::Remat;
pub use error::RematError;
pub use handle::{Handle, Managed};
pub use linear_cross_entropy::{
    Chunk, LinearCrossEntropy, LinearCrossEntropyLoss, LinearCrossEntropyLossConfig, OutOfRange,
    TargetOutOfRange, Targets, linear_cross_entropy,
};
pub use metric::RematMetric;
pub use op::{OpInfo, Work, op_table};
pub use outputs::Outputs;
pub use policy::{Fate, PerOperation, Policy};
pub use scope::{checkpoint, checkpoint_labelled, checkpoint_with, evict};
pub use stats::RematStats;
pub use verify::Verify;

/// The kinds of tensors.
pub mod kinds {
    pub use crate::kind::{Bool, Float, Int, Kind, Quant, Value};
}
