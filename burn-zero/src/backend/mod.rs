//! The backend decorator: gradients are met while backward still computes others.
//!
//! `ops.rs` makes every operation from its row and hooks the parameters on their way in; `tape.rs` is what that takes of
//! autodiff; `attached.rs` knows this thread's parameters; `autodiff.rs` is the backward pass; `stream.rs` draws random numbers. `with_host`
//! is the backend of what comes out of it: gradients that may be in host memory.

mod attached;
mod autodiff;
mod ops;
mod sharded;
pub(crate) mod stream;
mod tape;
mod with_host;

pub(crate) use attached::{attach, node_behind};
pub use autodiff::ShardedGradients;
pub use sharded::Sharded;
pub use tape::Tape;
pub(crate) use with_host::on_host;
pub use with_host::{HostTensor, PlacedTensor, WithHost};
