//! Precision of the computation.

use serde::{Deserialize, Serialize};

/// What operations compute in. Parameters, gradients and optimizer state are f32 in all of them: under burn-amp the casts
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
    /// A scale that does not move.
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
        /// The scale never gets below.
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
