//! The sharded optimizer.
//!
//! `zero_optimizer.rs` is the wrapper, `step.rs` its step; `prepare.rs` gets to know a model, and `initial.rs` gives all ranks the same weights of it.
//! `parameters.rs` knows the module's parameters, `gradients.rs` brings theirs, `pieces.rs` cuts both, `parameter_shards.rs` is the module
//! that the wrapped optimizer meets, `gather.rs` puts the updated pieces together, and `replace.rs` gives a module other tensors.
//! `statistics.rs` knows what clones of a module share. `trial.rs` finds optimizers that cannot be sharded exactly. `rank_context.rs` is how an optimizer inside of a `Learner` finds its ranks,
//! and `whole_record.rs` what rank 0 saves there.

mod error;
mod gather;
mod gradients;
mod initial;
mod parameter_shards;
mod parameters;
mod pieces;
mod prepare;
mod rank_context;
mod replace;
mod statistics;
mod step;
mod trial;
mod whole_record;
mod zero_optimizer;

pub use error::ZeroOptimizerError;
pub(crate) use parameter_shards::{MOST_DIMENSIONS, shard_id};
pub use parameter_shards::{ParameterShard, ParameterShards, ShardOptimizer};
pub(crate) use parameters::Parameters;
pub(crate) use rank_context::RankContext;
pub(crate) use replace::replace_tensors;
pub(crate) use statistics::Statistics;
pub use statistics::independent;
pub use zero_optimizer::ZeroOptimizer;
