//! The backend decorator, which takes gradients out of a backward pass while it still computes others.
//!
//! `ops.rs` makes every operation from its row of the operation table and hooks parameters among the operands; `tape.rs` implements
//! hooks on autodiff; `attached.rs` lists this thread's parameters; `autodiff.rs` is the backward pass; `stream.rs` draws random numbers.
//! `with_host` is the backend of the resulting gradients, which may be in host memory.

mod attached;
mod autodiff;
mod ops;
mod sharded;
pub(crate) mod stream;
mod tape;
mod with_host;

pub(crate) use attached::{attach, is_hooked, leaf_node};
pub use autodiff::ShardedGradients;
pub use sharded::Sharded;
pub use tape::Tape;
pub(crate) use with_host::on_host;
pub use with_host::{HostTensor, PlacedTensor, WithHost};
