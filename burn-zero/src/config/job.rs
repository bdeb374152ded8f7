//! Settings of a job: the memory of optimizer state, the precision of operations, the optimizer.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The memory in which the optimizer state of a rank's shard is kept and updated (ZeRO-Offload, Ren et al., arXiv 2101.06840).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum OptimizerOffload {
    /// On the device.
    #[default]
    None,
    /// In host memory, updated by the host's processor.
    Host {
        /// The part of the elements that is offloaded, 0 to 1; the rest stays on the device.
        ratio: f64,
    },
}

impl OptimizerOffload {
    /// The part of the elements that is offloaded.
    pub fn ratio(&self) -> f64 {
        match self {
            Self::None => 0.0,
            Self::Host { ratio } => *ratio,
        }
    }
}

/// Settings of stage 3, with DeepSpeed's names and defaults. They are read but not used: stage 3 is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Stage3Config {
    /// Elements that are gathered ahead of their use, at most. Default 5e7.
    #[serde(alias = "stage3_prefetch_bucket_size")]
    pub prefetch_bucket_size: u64,
    /// A parameter of fewer elements stays whole on every rank. Default 1e5.
    #[serde(alias = "stage3_param_persistence_threshold")]
    pub param_persistence_threshold: u64,
    /// Elements of all parameters that stay whole, at most. Default 2^63 - 1.
    #[serde(alias = "stage3_model_persistence_threshold")]
    pub model_persistence_threshold: u64,
    /// Elements of gathered parameters that a rank holds at once, at most. Default 1e9.
    #[serde(alias = "stage3_max_live_parameters")]
    pub max_live_parameters: u64,
    /// A gathered parameter is kept if its next use is within so many elements. Default 1e9.
    #[serde(alias = "stage3_max_reuse_distance")]
    pub max_reuse_distance: u64,
    /// Elements that the optimizer updates at a time. Default 1e9.
    pub sub_group_size: u64,
    /// Whether a saved model has whole 16-bit parameters. Default false.
    #[serde(
        alias = "stage3_gather_16bit_weights_on_model_save",
        alias = "stage3_gather_fp16_weights_on_model_save"
    )]
    pub gather_16bit_weights_on_model_save: bool,
    /// Whether a rank's shard of the parameters is in host memory (`offload_param`). Default false.
    pub offload_param: bool,
}

impl Default for Stage3Config {
    fn default() -> Self {
        Self {
            prefetch_bucket_size: 50_000_000,
            param_persistence_threshold: 100_000,
            model_persistence_threshold: i64::MAX as u64,
            max_live_parameters: 1_000_000_000,
            max_reuse_distance: 1_000_000_000,
            sub_group_size: 1_000_000_000,
            gather_16bit_weights_on_model_save: false,
            offload_param: false,
        }
    }
}

/// The type in which operations compute. Parameters, gradients and optimizer state are always f32: under burn-amp the casts
/// are part of the operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Single precision.
    #[default]
    F32,
    /// Brain floating point under autocast, without loss scaling.
    Bf16,
    /// Half precision under autocast, with loss scaling.
    F16(LossScaling),
}

/// How losses are scaled, as plain numbers for burn-amp's `GradScalerConfig`: `init_scale`, `growth_interval`, `hysteresis`
/// and `min_scale` there; growth 2, backoff 0.5.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", deny_unknown_fields)]
pub enum LossScaling {
    /// A constant scale.
    Fixed {
        /// The scale.
        scale: f32,
    },
    /// A scale that doubles after `window` finite steps and halves at an overflow.
    Dynamic {
        /// The first scale; 2 to the power of DeepSpeed's `initial_scale_power`.
        initial_scale: f32,
        /// Finite steps in a row before the scale doubles.
        window: u32,
        /// Overflows since the scale last grew before it halves.
        hysteresis: u32,
        /// The least scale.
        min_scale: f32,
    },
}

impl Default for LossScaling {
    /// DeepSpeed's: from 65536, window 1000, hysteresis 2, at least 1.
    fn default() -> Self {
        Self::Dynamic {
            initial_scale: 65536.0,
            window: 1000,
            hysteresis: 2,
            min_scale: 1.0,
        }
    }
}

/// An optimizer, as plain numbers. Defaults are DeepSpeed's, or PyTorch's for those that DeepSpeed takes from there.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase", deny_unknown_fields)]
pub enum OptimizerConfig {
    /// Adam with L2 regularisation: weight decay is added to the gradient (`adam_w_mode: false`).
    Adam(AdamParams),
    /// Adam with decoupled weight decay; in DeepSpeed's files also `"Adam"`, unless `adam_w_mode` is false.
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
    /// Weight decay. Default 0, DeepSpeed's; PyTorch's AdamW (`torch_adam: true` in DeepSpeed's file) has 0.01.
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

impl fmt::Display for OptimizerOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("on the device"),
            Self::Host { ratio } => write!(f, "in host memory, {} % of it", ratio * 100.0),
        }
    }
}

impl fmt::Display for Precision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::F32 => f.write_str("f32"),
            Self::Bf16 => f.write_str("bf16 under autocast, f32 parameters"),
            Self::F16(scaling) => write!(f, "f16 under autocast, f32 parameters, {scaling}"),
        }
    }
}

impl fmt::Display for LossScaling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fixed { scale } => write!(f, "losses times {scale}"),
            Self::Dynamic {
                initial_scale,
                window,
                hysteresis,
                min_scale,
            } => write!(
                f,
                "losses times {initial_scale} at first, doubled after {window} finite steps, halved at overflow {hysteresis}, \
                 at least {min_scale}"
            ),
        }
    }
}

impl fmt::Display for OptimizerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
