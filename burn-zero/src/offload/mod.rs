//! Optimizer state in host memory.

mod host_adamw;

pub use host_adamw::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostAdamWError,
    InstructionSet, OpenStep, ParamsOut,
};
