//! An update over ranks.
//!
//! `reduction.rs` is `.reduce(..)`, and `rank_reduction.rs` how it reduces; `reduced_update.rs` is
//! the last part of the update that it makes, `shard_update.rs` the clipping and the optimizer
//! inside of it, which step on the module of `parameter_shards.rs`. `sharding.rs` is what a rank
//! knows of the model: `prepare.rs` checks that the ranks' models agree and broadcasts rank 0's
//! weights, with the help of `trial.rs`, which finds optimizers that cannot be sharded as asked;
//! `step.rs` is a step, and `gather.rs` makes parameters of all ranks' updated shards; `average.rs`
//! puts averages of the weights in their place. `whole_record.rs` makes the record that rank 0 saves
//! in a Learner.

mod average;
mod gather;
mod parameter_shards;
mod prepare;
mod rank_reduction;
mod reduced_update;
mod reduction;
mod shard_update;
mod sharding;
mod step;
mod trial;
mod whole_record;

pub(crate) use parameter_shards::shard_id;
pub use parameter_shards::{ParameterShard, ParameterShards};
pub use prepare::shard_parameters;
pub use rank_reduction::RankReduction;
pub use reduction::ReduceOverRanks;
pub(crate) use sharding::{LastPrepared, Prepared, hook};
