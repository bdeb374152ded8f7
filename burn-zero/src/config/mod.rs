//! The configuration of a job: stage, batches, precision, offload. Values only, independent of Burn and of the other crates.

mod batch;
mod deepspeed;
mod error;
mod job;
mod scheduler;
mod zero_config;

pub use batch::{BatchConfig, BatchSizes};
pub use deepspeed::AutoValues;
pub use error::ConfigError;
pub use job::{
    AdagradParams, AdamParams, LossScaling, OptimizerConfig, OptimizerOffload, Precision,
    SgdParams, Stage3Config,
};
pub use scheduler::{SchedulerConfig, Warmup, WarmupShape};
pub use zero_config::{IgnoredKey, ResolvedConfig, ZeroConfig};
