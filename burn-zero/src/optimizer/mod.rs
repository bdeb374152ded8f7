//! The sharded optimizer.
//!
//! `zero_optimizer.rs` is the step; `parameters.rs` knows the module's parameters, `gradients.rs` brings theirs, `pieces.rs` cuts
//! both,
//! `shards.rs` is the module that the wrapped optimizer meets, `gather.rs` puts the updated pieces together, `replace.rs` gives a
//! module other tensors,
//! `initial.rs` gives all ranks the same weights, and `elementwise.rs` finds optimizers that cannot be cut.

mod elementwise;
mod gather;
mod gradients;
mod initial;
mod parameters;
mod pieces;
mod replace;
mod shards;
mod zero_optimizer;

pub(crate) use parameters::Parameters;
pub(crate) use replace::replace_tensors;
pub(crate) use shards::piece_id;
pub use shards::{Piece, Shards};
pub use zero_optimizer::ZeroOptimizer;
