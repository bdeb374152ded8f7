//! The loss scale as a pure state machine: per step it gets whether gradients overflowed and
//! returns the scale. No burn import.
//!
//! ```text
//! update(found_inf):
//!     if found_inf:
//!         growth_tracker = 0
//!         if hysteresis_left > 1:  hysteresis_left -= 1                         # tolerated
//!         elif scale <= floor:     collapsed                                    # cannot be lowered
//!         else:                    scale = max(scale * backoff_factor, floor)
//!     else:
//!         growth_tracker += 1
//!         if growth_tracker == growth_interval:
//!             growth_tracker = 0
//!             hysteresis_left = hysteresis
//!             if isfinite(scale * growth_factor):  scale *= growth_factor
//! ```
//!
//! With hysteresis 1 and no floor this is PyTorch's `_amp_update_scale_`
//! (aten/src/ATen/native/cuda/AmpKernels.cu); hysteresis and floor are those of DeepSpeed's
//! `DynamicLossScaler` (deepspeed/runtime/fp16/loss_scaler.py).

use serde::{Deserialize, Serialize};

use crate::scaler::GradScalerConfig;

/// The dynamic loss scale, as a plain value: tell it whether a step overflowed, then read the next
/// scale.
///
/// ```
/// use burn_amp::{GradScalerConfig, LossScale, ScaleUpdate};
///
/// let config = GradScalerConfig { growth_interval: 2, ..Default::default() };
/// let mut loss_scale = LossScale::new(&config);
/// assert_eq!(loss_scale.scale(), 65536.0);
///
/// assert_eq!(loss_scale.update(true), ScaleUpdate::BackedOff);
/// assert_eq!(loss_scale.scale(), 32768.0);
///
/// assert_eq!(loss_scale.update(false), ScaleUpdate::Kept);
/// assert_eq!(loss_scale.update(false), ScaleUpdate::Grown);
/// assert_eq!(loss_scale.scale(), 65536.0);
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct LossScale {
    config: GradScalerConfig,
    state: LossScaleState,
}

/// The part of a [`LossScale`] that changes, which a record keeps.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LossScaleState {
    /// The current scale.
    pub scale: f32,
    /// Finite steps since the scale last changed or a step last overflowed (PyTorch's
    /// `_growth_tracker`).
    pub growth_tracker: u32,
    /// The scale backs off at an overflow when this is 1 (DeepSpeed's `cur_hysteresis`).
    pub hysteresis_left: u32,
}

/// What one [`LossScale::update`] did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleUpdate {
    /// The scale is larger now.
    Grown,
    /// The step overflowed and the scale is smaller now.
    BackedOff,
    /// The scale is what it was: an ordinary step, or an overflow that hysteresis or a fixed scale
    /// tolerates.
    Kept,
    /// The step overflowed and the scale is already as small as it may get. It stays there;
    /// training should stop.
    Collapsed,
}

impl LossScale {
    /// The initial state.
    ///
    /// # Panics
    ///
    /// If the configuration is invalid, with the message of [`GradScalerConfig::validate`].
    pub fn new(config: &GradScalerConfig) -> Self {
        if let Err(error) = config.validate() {
            panic!("{error}");
        }
        let state = LossScaleState {
            scale: config.init_scale,
            growth_tracker: 0,
            hysteresis_left: config.hysteresis,
        };
        Self {
            config: config.clone(),
            state,
        }
    }

    /// The factor that the next loss is multiplied with. Always finite and positive.
    pub fn scale(&self) -> f32 {
        self.state.scale
    }

    /// Finite steps since the scale last changed or a step last overflowed: always below
    /// `growth_interval`.
    pub fn growth_tracker(&self) -> u32 {
        self.state.growth_tracker
    }

    /// Records one step: `found_inf` tells whether any of its gradients was infinite or NaN.
    pub fn update(&mut self, found_inf: bool) -> ScaleUpdate {
        match (self.config.dynamic, found_inf) {
            (false, _) => ScaleUpdate::Kept,
            (true, true) => self.overflowed(),
            (true, false) => self.succeeded(),
        }
    }

    /// Sets the scale, which is finite and positive, and leaves the growth tracker.
    pub(crate) fn set_scale(&mut self, scale: f32) {
        self.state.scale = scale;
    }

    /// The state for a record.
    pub fn state(&self) -> LossScaleState {
        self.state
    }

    /// Continues from a record. The configuration wins where the two disagree: a fixed scale stays
    /// what it is, no more hysteresis is left than configured, no scale is below `min_scale` or
    /// beyond f32.
    pub fn restore(&mut self, state: LossScaleState) {
        if !self.config.dynamic {
            return;
        }
        self.state = LossScaleState {
            scale: state.scale.max(self.floor()).min(f32::MAX),
            growth_tracker: state.growth_tracker,
            hysteresis_left: state.hysteresis_left.clamp(1, self.config.hysteresis),
        };
    }

    fn overflowed(&mut self) -> ScaleUpdate {
        self.state.growth_tracker = 0;
        if self.state.hysteresis_left > 1 {
            self.state.hysteresis_left -= 1;
            return ScaleUpdate::Kept;
        }
        if self.state.scale <= self.floor() {
            return ScaleUpdate::Collapsed;
        }
        self.state.scale = self.scaled_by(self.config.backoff_factor).max(self.floor());
        ScaleUpdate::BackedOff
    }

    fn succeeded(&mut self) -> ScaleUpdate {
        self.state.growth_tracker += 1;
        // Not `==`: a restored tracker may exceed the interval if the configuration has shortened
        // it.
        if self.state.growth_tracker < self.config.growth_interval {
            return ScaleUpdate::Kept;
        }
        self.state.growth_tracker = 0;
        self.state.hysteresis_left = self.config.hysteresis;

        let grown = self.scaled_by(self.config.growth_factor);
        if !grown.is_finite() {
            return ScaleUpdate::Kept;
        }
        self.state.scale = grown;
        ScaleUpdate::Grown
    }

    /// The scale is f32 and the factor f64, and the product is rounded once: as in PyTorch, where
    /// it matters for factors that are not powers of two.
    fn scaled_by(&self, factor: f64) -> f32 {
        (f64::from(self.state.scale) * factor) as f32
    }

    /// Subnormal scales are never used: many accelerators flush them to zero, and the inverses of
    /// the smallest overflow.
    fn floor(&self) -> f32 {
        self.config.min_scale.max(f32::MIN_POSITIVE)
    }
}
