//! The backend decorator, which takes gradients out of a backward pass while it still computes
//! others.
//!
//! `sharded.rs` is the backend with its backward pass; `ops.rs` makes every operation from its row
//! of the operation table and hooks parameters among the operands; `tape.rs` implements hooks on
//! autodiff; `leaves.rs` lists this thread's parameters; `stream.rs` draws random numbers.
//! `with_host.rs` is the backend of the resulting gradients, which may be in host memory;
//! `placed.rs` has its tensors, and what is computed in host memory; `of_rank.rs` warns whoever
//! reads a gradient of one rank outside of the update.

mod leaves;
mod of_rank;
mod ops;
mod placed;
mod sharded;
pub(crate) mod stream;
mod tape;
mod with_host;

pub(crate) use leaves::{attach, is_hooked, is_taken, leaf_node, trained_leaf};
pub use placed::{GradientPart, HostTensor, OfRank, PlacedTensor};
pub use sharded::{Sharded, ShardedGradients};
pub use with_host::WithHost;
pub(crate) use with_host::on_host;
