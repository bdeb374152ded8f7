//! `burn-amp` for Burn 0.22.1: rule, policies, table and loss-scale state machine by path, over
//! burn-backend alone.
//!
//! burn-dispatch depends on this crate. Its own are `decorator/`, whose tensors carry no mark, and
//! `scaler.rs`, the scale that backward multiplies the loss with; `burn-decorated` has what steps
//! an optimizer.
#![allow(
    dead_code,
    unused_imports,
    unused_macros,
    reason = "the shared sources have more than is used here"
)]

#[allow(dead_code, reason = "no scaler marks its parameters here")]
#[path = "../../../burn-amp/src/cast.rs"]
mod cast;
#[path = "../../../burn-amp/src/config.rs"]
mod config;
mod decorator;
#[path = "../../../burn-amp/src/error.rs"]
mod error;
#[path = "../../../burn-amp/src/loss_scale.rs"]
mod loss_scale;
#[path = "../../../burn-amp/src/policy.rs"]
mod policy;
mod scaler;
#[path = "../../../burn-amp/src/table.rs"]
mod table;

pub use cast::{Cast, Lineage};
pub use config::{AmpConfig, PolicyName};
pub use decorator::{Autocast, Recorded, ScaledGradients, autocast};
pub use error::AmpError;
pub use loss_scale::{LossScale, LossScaleState, ScaleUpdate};
pub use policy::{Bf16, Configured, F16, F32, Mode, Off, Policy};
pub use scaler::{GradScaler, GradScalerConfig};
pub use table::{OpRow, op_table};
