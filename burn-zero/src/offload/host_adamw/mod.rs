//! AdamW over flat buffers in host memory: fused, multi-threaded, SIMD chosen at run time.

mod buffer;
mod config;
mod error;
mod kernel;
mod open_step;
mod optimizer;
mod prefetch;
mod ranges;
mod simd;
mod slices;

pub use config::{AdamWStep, DecayMode, HostAdamWConfig};
pub use error::HostAdamWError;
pub use open_step::OpenStep;
pub use optimizer::{AdamWState, HostAdamW};
pub use simd::InstructionSet;
pub use slices::{Gradients, ParamsOut};
