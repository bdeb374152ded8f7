//! One loss scale for several updates: it moves once an iteration, as PyTorch's
//! `scaler.update()`.

use std::sync::{Arc, Weak};

use crate::{GradScalerConfig, LossScale, ScaleUpdate};

/// Which update takes a step. Clones of an update are the same one.
#[derive(Clone, Debug, Default)]
pub(super) struct UpdateId(Arc<()>);

impl UpdateId {
    pub(super) fn downgrade(&self) -> Weak<()> {
        Arc::downgrade(&self.0)
    }
}

/// A step of an update.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) update: UpdateId,
    /// Whether it updates parameters if it is finite: a micro-batch within a window does not, and
    /// counts only if it overflows.
    pub(super) is_update: bool,
}

/// The loss scale, and the steps of the current iteration.
///
/// An iteration is one step of each update that lives; it ends early where one of them steps
/// again, as the discriminator of a GAN that steps more often than the generator. The first
/// overflow of an iteration lowers the scale at once, further ones do not; an iteration without any
/// counts once towards growth.
#[derive(Clone, Debug)]
pub(super) struct SharedScale {
    pub(super) loss_scale: LossScale,
    updates: Vec<Weak<()>>,
    stepped: Vec<Weak<()>>,
    overflowed: bool,
}

impl SharedScale {
    pub(super) fn new(loss_scale: LossScale) -> Self {
        Self {
            loss_scale,
            updates: Vec::new(),
            stepped: Vec::new(),
            overflowed: false,
        }
    }

    /// The initial scale, for the same updates.
    pub(super) fn reset(&mut self, config: &GradScalerConfig) -> Self {
        Self {
            updates: core::mem::take(&mut self.updates),
            ..Self::new(LossScale::new(config))
        }
    }

    /// Adds an update that shares this scale.
    pub(super) fn register(&mut self, update: &UpdateId) {
        self.updates.push(update.downgrade());
    }

    /// Whether the same steps lead on from both.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        let stepped = |scale: &Self| scale.stepped.iter().map(Weak::as_ptr).collect::<Vec<_>>();
        stepped(self) == stepped(other)
            && self.overflowed == other.overflowed
            && self.loss_scale == other.loss_scale
    }

    /// Records a step and returns its effect on the scale.
    pub(super) fn step(&mut self, step: &Step, found_inf: bool) -> ScaleUpdate {
        if !step.is_update && !found_inf {
            return ScaleUpdate::Kept;
        }
        let own = step.update.downgrade();
        if self.stepped.iter().any(|other| other.ptr_eq(&own)) {
            self.end_iteration();
        }
        self.stepped.push(own);
        let update = match found_inf && !self.overflowed {
            true => self.loss_scale.update(true),
            false => ScaleUpdate::Kept,
        };
        self.overflowed |= found_inf;
        self.updates.retain(|live| live.strong_count() > 0);
        match self.stepped.len() < self.updates.len() {
            true => update,
            false if found_inf => {
                self.end_iteration();
                update
            }
            false => self.end_iteration(),
        }
    }

    fn end_iteration(&mut self) -> ScaleUpdate {
        self.stepped.clear();
        match core::mem::take(&mut self.overflowed) {
            true => ScaleUpdate::Kept,
            false => self.loss_scale.update(false),
        }
    }
}
