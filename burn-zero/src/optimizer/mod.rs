//! The sharded optimizer.
//!
//! `zero_optimizer.rs` is the wrapper and `step.rs` its step; `prepare.rs` checks that the ranks'
//! models agree and broadcasts rank 0's weights. `parameters.rs` lists the module's parameters,
//! `parameter_shards.rs` is the module that the wrapped optimizer steps on, and `gather.rs` makes
//! parameters of all ranks' updated shards. `statistics.rs` handles running statistics, which
//! clones of a module share; `trial.rs` finds optimizers that cannot be sharded as asked.
//! `rank_context.rs` connects an optimizer inside a `Learner` to its strategy, and
//! `whole_record.rs` makes the record that rank 0 saves there.

mod error;
mod gather;
mod parameter_shards;
mod parameters;
mod prepare;
mod rank_context;
mod reduction;
mod sharding;
mod statistics;
mod step;
mod trial;
mod whole_record;
mod zero_optimizer;

pub use error::ZeroOptimizerError;
pub(crate) use parameter_shards::shard_id;
pub use parameter_shards::{ParameterShard, ParameterShards, ShardOptimizer};
pub(crate) use parameters::Parameters;
pub use prepare::shard_parameters;
pub(crate) use rank_context::{Ask, RankContext};
pub use reduction::{RankReduction, ReduceOverRanks};
pub(crate) use statistics::Statistics;
pub use zero_optimizer::ZeroOptimizer;
