//! ZeRO for Burn: sharded optimizer state and gradients over real process groups, and host offload.

mod offload;

pub use offload::{
    AdamWState, AdamWStep, DecayMode, Gradients, HostAdamW, HostAdamWConfig, HostAdamWError,
    InstructionSet, OpenStep, ParamsOut,
};
