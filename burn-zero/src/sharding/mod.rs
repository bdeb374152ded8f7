//! What can be chosen for sharding, and what cannot be sharded.

mod error;
mod settings;
mod stage;

pub use error::ShardingError;
pub use settings::Sharding;
pub use stage::Stage;
