//! The sharded optimizer.
//!
//! `zero_optimizer.rs` is the step; `parameters.rs` knows the module's parameters, `gradients.rs` brings theirs, `pieces.rs` cuts
//! both,
//! `shards.rs` is the module that the wrapped optimizer meets, `gather.rs` puts the updated pieces together,
//! `state` takes the optimizer's state apart by names, `prepare.rs` gets to know a model,
//! `initial.rs` gives all ranks the same weights, and `elementwise.rs` finds optimizers that cannot be cut. `seat.rs` is how an
//! optimizer inside of a `Learner` finds its ranks.

mod elementwise;
mod gather;
mod gradients;
mod initial;
mod parameters;
mod pieces;
mod prepare;
pub(crate) mod seat;
mod shards;
mod state;
mod zero_optimizer;

pub(crate) use prepare::{attach_to, device_of, prepare};
pub use shards::{Piece, Shards};
pub use state::{ShardState, StateSlot, StateTensor};
pub use zero_optimizer::ZeroOptimizer;
