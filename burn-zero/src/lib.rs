//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.

mod config;
mod estimate;
mod offload;
mod stage;

pub use config::{
    AdagradParams, AdamParams, BatchConfig, BatchSizes, CommunicationDtype, ConfigError,
    IgnoredKey, LossScaling, OptimizerConfig, OptimizerOffload, Precision, ResolvedConfig,
    SchedulerConfig, SgdParams, Warmup, WarmupShape, ZeroConfig,
};
pub use estimate::{Estimate, EstimateTable, ModelStates, StateLayout, estimate};
pub use offload::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostAdamWError,
    InstructionSet, OpenStep, ParamsOut,
};
pub use stage::Stage;
