//! A scaler as a part of a [`burn_update::Update`].

use burn::tensor::Device;
use burn::tensor::backend::AutodiffBackend;
use burn_decorator::gauge::Gauge;
use burn_update::{IntoScale, PartState, Scale, Stateful, Step, UpdateError};

use super::active::{Said, saying};
use super::config::GradScalerConfig;
use super::handle::GradScaler;
use super::metric;
use super::shared_scale::{self, UpdateId};
use super::state::{Counters, ScalerState};
use crate::policy::{Off, autocast};
use crate::{AmpError, LossScaleState};

/// The name of the scale in records and errors.
const SCALE: &str = "scale";

/// The scale of an update: made of a [`GradScaler`] or a [`GradScalerConfig`] by
/// [`Update::scale`](burn_update::Update::scale). The scaler stays a handle to read and to set the
/// scale.
///
/// A step with an infinite or NaN gradient anywhere leaves the parameters, the optimizer's moments
/// and its step counts as they were, bit for bit (PyTorch's `scaler.step`). The scale moves once an
/// iteration (`scaler.update`), which is every step unless several updates share the scaler. The
/// other parts see true gradients only. Their arithmetic runs with autocast off.
///
/// A clone shares the scaler; a copy for another rank
/// ([`copy_for_rank`](burn_decorator::ranks::copy_for_rank)) has its own.
///
/// # Errors
///
/// A step returns the error of [`GradScaler::error`] where training cannot go on:
/// [`ScaleCollapsed`](crate::AmpError::ScaleCollapsed),
/// [`NonFiniteLoss`](crate::AmpError::NonFiniteLoss) (three steps in a row before any was taken),
/// [`HalfPrecisionParameter`](crate::AmpError::HalfPrecisionParameter). In a Learner it panics with
/// its message. Given [an interrupter](GradScaler::with_interrupter) it stops the training with the
/// same message instead, and keeps skipping overflowing steps until that takes effect.
///
/// # Cost
///
/// To find non-finite gradients, one sum per parameter and one host read of all these sums; an
/// exact check follows only in a step that overflows. With an accumulation the device decides about
/// each micro-batch, and the host reads once a window. Where ranks train together, one collective a
/// step, in which they exchange which gradients are non-finite.
#[derive(Clone, Debug)]
pub struct UpdateScale {
    scaler: GradScaler,
    id: UpdateId,
    /// Whether the step that is under way has updated parameters.
    updated: bool,
}

impl<B: AutodiffBackend> IntoScale<B> for GradScalerConfig {
    type Part = UpdateScale;

    fn into_scale(self) -> Result<UpdateScale, UpdateError> {
        IntoScale::<B>::into_scale(GradScaler::new(self)?)
    }
}

impl<B: AutodiffBackend> IntoScale<B> for GradScaler {
    type Part = UpdateScale;

    fn into_scale(self) -> Result<UpdateScale, UpdateError> {
        self.use_on_thread();
        let id = UpdateId::default();
        self.shared.lock().register(&id);
        Ok(UpdateScale {
            scaler: self,
            id,
            updated: false,
        })
    }
}

impl From<AmpError> for UpdateError {
    fn from(error: AmpError) -> Self {
        Self::of_part(SCALE, error)
    }
}

impl<B: AutodiffBackend> Stateful<B> for UpdateScale {
    fn name(&self) -> String {
        SCALE.to_owned()
    }

    /// None if nothing is scaled.
    fn gauges(&self) -> Vec<Gauge> {
        if self.scaler.shared.lock().is_enabled() {
            metric::gauges(&self.scaler)
        } else {
            Vec::new()
        }
    }

    fn save(&self) -> Option<PartState> {
        let mut state = PartState::default();
        let saved = self.scaler.shared.settled().to_record()?;
        let LossScaleState {
            scale,
            growth_tracker,
            hysteresis_left,
        } = saved.loss_scale;
        state.put_number("scale", scale.into());
        state.put_integer("growth tracker", growth_tracker.into());
        state.put_integer("hysteresis left", hysteresis_left.into());
        let counters = saved.counters;
        state.put_integer("steps", counters.steps);
        state.put_integer("skipped", counters.skipped);
        state.put_integer("skipped in a row", counters.skipped_in_a_row);
        state.put_integer("non-finite losses in a row", counters.stillborn.into());
        Some(state)
    }

    fn load(&mut self, mut state: PartState, _: &Device<B>) -> Result<(), UpdateError> {
        let scale = state.take_number("scale")? as f32;
        let mut integer = |name| state.take_integer(name);
        let mut short = |name| integer(name).map(|value| value.try_into().unwrap_or(u32::MAX));
        let loss_scale = LossScaleState {
            scale,
            growth_tracker: short("growth tracker")?,
            hysteresis_left: short("hysteresis left")?,
        };
        let counters = Counters {
            stillborn: short("non-finite losses in a row")?,
            steps: integer("steps")?,
            skipped: integer("skipped")?,
            skipped_in_a_row: integer("skipped in a row")?,
        };
        let saved = ScalerState {
            loss_scale,
            counters,
        };
        self.scaler.shared.settled().load_record(Some(saved));
        Ok(())
    }

    /// Unless the record of another update of the same scaler was loaded, which held the scale.
    fn start_anew(&mut self) {
        self.scaler.shared.settled().load_record(None);
    }
}

impl<B: AutodiffBackend> Scale<B> for UpdateScale {
    fn is_enabled(&self) -> bool {
        self.scaler.shared.lock().is_enabled()
    }

    fn backward(&self, backward: &mut dyn FnMut()) {
        saying(Said::Scaler(self.scaler.clone()), backward);
    }

    fn step(&mut self, step: &mut dyn FnMut()) {
        self.scaler.use_on_thread();
        let ((), updated) = autocast::<Off, _>(|| self.scaler.marking(step));
        self.updated = updated;
    }

    fn begin(&mut self, step: &Step<B::InnerBackend>) -> Result<bool, UpdateError> {
        self.scaler.check()?;
        let Some(half) = step.half_precision.clone() else {
            return Ok(true);
        };
        let error = AmpError::HalfPrecisionParameter {
            path: half.path,
            dtype: half.dtype,
        };
        self.scaler.shared.lock().fail(error);
        self.scaler.check()?;
        Ok(false)
    }

    fn record(&mut self, step: &Step<B::InnerBackend>) -> Result<(), UpdateError> {
        let mut state = self.scaler.shared.lock();
        if !state.is_enabled() {
            return Ok(());
        }
        // The micro-batches of a window that is flushed have been counted.
        if !step.overflowed.is_empty() {
            let taken = shared_scale::Step {
                update: self.id.clone(),
                is_update: true,
            };
            state.record(&taken, step.overflowed.clone());
        } else if let Some(verdict) = step.verdict.clone().filter(|_| !step.is_flush) {
            let taken = shared_scale::Step {
                update: self.id.clone(),
                is_update: step.updates(),
            };
            state.defer(taken, verdict);
        }
        state.absorb_known();
        // Where ranks train together, what was made may be this rank's shards, which no loss is
        // computed from.
        let updated = self.updated && step.ranks.is_none();
        if !step.is_flush || updated {
            state.stepped(&self.id, updated);
        }
        drop(state);
        self.scaler.check()?;
        Ok(())
    }
}
