//! What can be chosen for sharding, and what cannot be sharded.

mod error;
mod settings;

pub use error::ShardingError;
pub use settings::{Memory, Sharding};
