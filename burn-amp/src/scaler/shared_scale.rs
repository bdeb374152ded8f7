//! One loss scale for several optimizers: it moves once an iteration, as PyTorch's `scaler.update()`.

use std::sync::{Arc, Weak};

use crate::{GradScalerConfig, LossScale, ScaleUpdate};

/// Which wrapped optimizer takes a step. Clones of an optimizer are the same one.
#[derive(Clone, Debug, Default)]
pub(super) struct OptimizerId(Arc<()>);

/// The loss scale, and the steps of the current iteration.
///
/// An iteration is one step of each optimizer that lives; it ends early where one of them steps again, as the discriminator of a
/// GAN that steps more often than the generator. The first overflow of an iteration lowers the scale at once, further ones do
/// not; an iteration without any counts once towards growth.
#[derive(Clone, Debug)]
pub(super) struct SharedScale {
    pub(super) loss_scale: LossScale,
    optimizers: Vec<Weak<()>>,
    stepped: Vec<Weak<()>>,
    overflowed: bool,
}

impl SharedScale {
    pub(super) fn new(loss_scale: LossScale) -> Self {
        Self {
            loss_scale,
            optimizers: Vec::new(),
            stepped: Vec::new(),
            overflowed: false,
        }
    }

    /// The initial scale, for the same optimizers.
    pub(super) fn reset(&mut self, config: &GradScalerConfig) -> Self {
        Self {
            optimizers: core::mem::take(&mut self.optimizers),
            ..Self::new(LossScale::new(config))
        }
    }

    /// Adds an optimizer that shares this scale.
    pub(super) fn register(&mut self, optimizer: &OptimizerId) {
        self.optimizers.push(Arc::downgrade(&optimizer.0));
    }

    /// Whether the same steps lead on from both, after equally many steps of the same optimizers.
    pub(super) fn is_as(&self, other: &Self) -> bool {
        let key = |scale: &Self| (scale.stepped.len(), scale.overflowed);
        key(self) == key(other) && self.loss_scale == other.loss_scale
    }

    /// Records a step and returns its effect on the scale.
    pub(super) fn step(&mut self, optimizer: &OptimizerId, found_inf: bool) -> ScaleUpdate {
        let own = Arc::downgrade(&optimizer.0);
        if self.stepped.iter().any(|other| other.ptr_eq(&own)) {
            self.end_iteration();
        }
        self.stepped.push(own);
        let update = match found_inf && !self.overflowed {
            true => self.loss_scale.update(true),
            false => ScaleUpdate::Kept,
        };
        self.overflowed |= found_inf;
        self.optimizers.retain(|live| live.strong_count() > 0);
        match self.stepped.len() < self.optimizers.len() {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scale_of<const N: usize>() -> (SharedScale, [OptimizerId; N]) {
        let config = GradScalerConfig {
            init_scale: 1024.0,
            growth_interval: 2,
            ..Default::default()
        };
        let mut scale = SharedScale::new(LossScale::new(&config));
        let optimizers = [(); N].map(|()| OptimizerId::default());
        for optimizer in &optimizers {
            scale.register(optimizer);
        }
        (scale, optimizers)
    }

    #[test]
    fn two_optimizers_count_once_an_iteration() {
        let (mut scale, [a, b]) = scale_of();
        for (expected, tracker) in [(1024.0, 1), (2048.0, 0)] {
            assert_eq!(scale.step(&a, false), ScaleUpdate::Kept);
            scale.step(&b, false);
            assert_eq!(scale.loss_scale.scale(), expected);
            assert_eq!(scale.loss_scale.growth_tracker(), tracker);
        }
        assert_eq!(scale.step(&a, true), ScaleUpdate::BackedOff);
        assert_eq!(scale.step(&b, true), ScaleUpdate::Kept);
        assert_eq!(scale.loss_scale.scale(), 1024.0);
        // One of the two overflows, so the iteration does not count towards growth.
        scale.step(&a, false);
        assert_eq!(scale.step(&b, true), ScaleUpdate::BackedOff);
        assert_eq!(scale.loss_scale.growth_tracker(), 0);
    }

    #[test]
    fn an_optimizer_that_steps_again_begins_an_iteration() {
        let (mut scale, [often, rarely]) = scale_of();
        for _ in 0..3 {
            scale.step(&often, false);
        }
        assert_eq!(scale.loss_scale.scale(), 2048.0); // two iterations have ended
        scale.step(&rarely, false);
        assert_eq!(scale.loss_scale.growth_tracker(), 1);
    }

    #[test]
    fn an_optimizer_that_is_gone_is_not_waited_for() {
        let (mut scale, [stays, goes]) = scale_of();
        drop(goes);
        scale.step(&stays, false);
        assert_eq!(scale.step(&stays.clone(), false), ScaleUpdate::Grown);
    }
}
