//! The configuration of the loss scale.

use serde::{Deserialize, Serialize};

use crate::{AmpError, GradScaler};

/// Configuration of a [`GradScaler`](crate::GradScaler): the names and defaults of PyTorch's
/// `torch.amp.GradScaler`, plus DeepSpeed's hysteresis and minimum, plus a fixed scale.
///
/// Fields that a file leaves out take their defaults; names that do not exist are refused.
///
/// ```
/// use burn_amp::GradScalerConfig;
///
/// let config = GradScalerConfig::default().with_init_scale(1024.0).with_hysteresis(2);
/// assert!(config.validate().is_ok());
///
/// let error = GradScalerConfig { backoff_factor: 2.0, ..Default::default() }.validate().unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "GradScalerConfig: backoff_factor = 2, but it must be above 0 and below 1",
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradScalerConfig {
    /// The first scale. Default 65536.
    pub init_scale: f32,
    /// The scale is multiplied with this after `growth_interval` finite steps in a row. Default 2.
    pub growth_factor: f64,
    /// The scale is multiplied with this when a step overflows. Default 0.5.
    pub backoff_factor: f64,
    /// Finite steps in a row before the scale grows; with an accumulation updates. Default 2000.
    pub growth_interval: u32,
    /// Whether losses are scaled at all; `false` makes the scaler a no-op. Default true.
    pub enabled: bool,
    /// The scale backs off only at the `hysteresis`-th overflow since it last grew, and at each one
    /// after that (DeepSpeed's `hysteresis`). Default 1, as PyTorch behaves; DeepSpeed's own
    /// default is 2.
    pub hysteresis: u32,
    /// The scale never gets below this (DeepSpeed's `min_loss_scale`); an overflow there stops
    /// training. Default 1. With 0, as PyTorch behaves, the floor is the smallest normal f32.
    pub min_scale: f32,
    /// Whether the scale moves; `false` keeps it at `init_scale`. Default true.
    pub dynamic: bool,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
            hysteresis: 1,
            min_scale: 1.0,
            dynamic: true,
        }
    }
}

burn_decorator::config!(GradScalerConfig {
    init_scale: f32 = with_init_scale,
    growth_factor: f64 = with_growth_factor,
    backoff_factor: f64 = with_backoff_factor,
    growth_interval: u32 = with_growth_interval,
    enabled: bool = with_enabled,
    hysteresis: u32 = with_hysteresis,
    min_scale: f32 = with_min_scale,
    dynamic: bool = with_dynamic,
});

impl GradScalerConfig {
    /// A scale that never moves (DeepSpeed's `loss_scale` other than 0). Overflowing steps are
    /// skipped all the same; 100 in a row stop training
    /// ([`AmpError::ScaleCollapsed`](crate::AmpError::ScaleCollapsed)).
    pub fn fixed(scale: f32) -> Self {
        Self {
            init_scale: scale,
            dynamic: false,
            ..Self::default()
        }
    }

    /// No scaling and no skipping.
    pub fn disabled() -> Self {
        Self {
            enabled: false,
            ..Self::default()
        }
    }

    /// The scaler: a handle, and the scale of an update.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate).
    pub fn init(&self) -> Result<GradScaler, AmpError> {
        GradScaler::new(self)
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`AmpError::InvalidScalerConfig`] for the first field that cannot work, with its name and
    /// value.
    pub fn validate(&self) -> Result<(), AmpError> {
        let (init, min) = (self.init_scale, self.min_scale);
        let (growth, backoff) = (self.growth_factor, self.backoff_factor);
        let (interval, hysteresis) = (self.growth_interval, self.hysteresis);
        let is_low_enough = !self.dynamic || min <= init;
        let fields: [(_, &dyn ToString, _, _); 7] = [
            ("init_scale", &init, positive(init), "finite and above 0"),
            (
                "growth_factor",
                &growth,
                growth > 1.0 && growth < f64::INFINITY,
                "finite and above 1",
            ),
            (
                "backoff_factor",
                &backoff,
                backoff > 0.0 && backoff < 1.0,
                "above 0 and below 1",
            ),
            ("growth_interval", &interval, interval >= 1, "at least 1"),
            ("hysteresis", &hysteresis, hysteresis >= 1, "at least 1"),
            (
                "min_scale",
                &min,
                min == 0.0 || positive(min),
                "0, or finite and above 0",
            ),
            ("min_scale", &min, is_low_enough, "at most init_scale"),
        ];
        match fields.into_iter().find(|(_, _, holds, _)| !holds) {
            None => Ok(()),
            Some((field, value, _, expected)) => Err(AmpError::InvalidScalerConfig {
                field,
                value: value.to_string(),
                expected,
            }),
        }
    }
}

/// Subnormal scales are refused too: their inverses overflow.
pub(super) fn positive(scale: f32) -> bool {
    scale.is_normal() && scale > 0.0
}
