//! How a job trains: stages, batches, precision, offload. Values only: nothing here knows Burn or another crate of the suite.

mod batch;
mod deepspeed;
mod error;
mod offload;
mod optimizer;
mod precision;
mod resolved;
mod scheduler;
mod zero_config;

pub use batch::{BatchConfig, BatchSizes};
pub use error::ConfigError;
pub use offload::OptimizerOffload;
pub use optimizer::{AdagradParams, AdamParams, OptimizerConfig, SgdParams};
pub use precision::{LossScaling, Precision};
pub use resolved::ResolvedConfig;
pub use scheduler::{SchedulerConfig, Warmup, WarmupShape};
pub use zero_config::{IgnoredKey, ZeroConfig};
