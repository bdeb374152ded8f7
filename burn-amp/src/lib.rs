//! Automatic mixed precision for Burn.
mod cast;
mod config;
mod decorator;
mod error;
mod policy;
mod scaler;
mod table;

pub use cast::{Cast, Lineage};
pub use config::{AmpConfig, PolicyName};
pub use decorator::{Autocast, AutocastTensor, ScaledGradients};
pub use error::AmpError;
pub use policy::{Bf16, Configured, F16, Mode, Off, Policy, autocast};
pub use scaler::GradScaler;
pub use table::{OpRow, op_table};
