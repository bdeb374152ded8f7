//! The optimizer that a configuration names.

use serde::{Deserialize, Serialize};

/// An optimizer, as plain numbers. Defaults are DeepSpeed's, or PyTorch's for those that DeepSpeed takes from there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum OptimizerConfig {
    /// Adam with L2 regularisation: weight decay is added to the gradient (`adam_w_mode: false`).
    Adam(AdamParams),
    /// Adam with decoupled weight decay. What DeepSpeed makes of `"Adam"` too, unless `adam_w_mode` is false.
    AdamW(AdamParams),
    /// Stochastic gradient descent.
    Sgd(SgdParams),
    /// Adagrad.
    Adagrad(AdagradParams),
}

/// Of [`OptimizerConfig::Adam`] and [`OptimizerConfig::AdamW`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdamParams {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Decays of both moments. Default 0.9 and 0.999.
    pub betas: (f64, f64),
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: f64,
    /// Weight decay. Default 0, DeepSpeed's; PyTorch's AdamW has 0.01.
    pub weight_decay: f64,
}

/// Of [`OptimizerConfig::Sgd`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SgdParams {
    /// Learning rate. Default 0.001.
    pub lr: f64,
    /// Momentum. Default 0.
    pub momentum: f64,
    /// Dampening of the momentum. Default 0.
    pub dampening: f64,
    /// Whether the momentum is Nesterov's. Default false.
    pub nesterov: bool,
    /// L2 regularisation. Default 0.
    pub weight_decay: f64,
}

/// Of [`OptimizerConfig::Adagrad`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct AdagradParams {
    /// Learning rate. Default 0.01.
    pub lr: f64,
    /// Added to the root of the sum of squares. Default 1e-10.
    pub eps: f64,
    /// L2 regularisation. Default 0.
    pub weight_decay: f64,
}

impl Default for AdamParams {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 0.0,
        }
    }
}

impl Default for SgdParams {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.0,
            dampening: 0.0,
            nesterov: false,
            weight_decay: 0.0,
        }
    }
}

impl Default for AdagradParams {
    fn default() -> Self {
        Self {
            lr: 1e-2,
            eps: 1e-10,
            weight_decay: 0.0,
        }
    }
}

impl OptimizerConfig {
    /// Its learning rate.
    pub fn lr(&self) -> f64 {
        match self {
            Self::Adam(params) | Self::AdamW(params) => params.lr,
            Self::Sgd(params) => params.lr,
            Self::Adagrad(params) => params.lr,
        }
    }
}
