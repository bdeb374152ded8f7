//! The scale that `backward` uses.

use std::cell::Cell;

use burn::tensor::{Device, Tensor, backend::Backend};

use super::deferred::{ActiveScale, inverse};
use super::{overflow::LossProbe, registry};
use crate::FirstNonFinite;

thread_local! {
    static REPEATED: Cell<Option<f32>> = const { Cell::new(None) };
}

/// Runs `f`, a repetition of a step, at the scale that the step had, and out of the scaler's sight.
pub(crate) fn at_scale<R>(scale: f32, f: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            REPEATED.set(None);
        }
    }
    let _restore = Restore;
    REPEATED.set(Some(scale));
    f()
}

/// A step that can be run once more.
pub(crate) type LastStep = Box<dyn FnOnce() -> Option<FirstNonFinite> + Send>;

/// If this thread's scaler has explained no overflow yet: the step that [`keep_step`] was given, and its scale, if it overflowed. Waits
/// for its outcome.
pub(crate) fn overflowed_step() -> Option<Option<(LastStep, f32)>> {
    let scaler = registry::of_thread().filter(|scaler| scaler.is_enabled())?;
    let mut state = scaler.settled();
    let last = state.last_step.take();
    let overflow = state.last_overflow.as_ref();
    let overflow = overflow.filter(|_| state.counters.skipped_in_a_row > 0);
    (!state.is_explained).then(|| last.zip(overflow.map(|overflow| overflow.scale)))
}

/// Keeps a step until its outcome is known.
pub(crate) fn keep_step(step: LastStep) {
    if let Some(scaler) = registry::of_thread() {
        scaler.settled().last_step = Some(step);
    }
}

/// Tells this thread's scaler which operation overflowed first.
pub(crate) fn explain(first: Option<FirstNonFinite>) {
    if let Some(scaler) = registry::of_thread() {
        match &first {
            Some(first) => log::warn!("the skipped step, run once more: {first}"),
            None => log::warn!(
                "the skipped step, run once more, did not overflow, or there is no burn_amp::Watch below autodiff"
            ),
        }
        let mut state = scaler.settled();
        (state.is_explained, state.first_non_finite) = (true, first);
    }
}

/// The scale for a loss on `device` that is about to be differentiated on this thread; `needs` if its gradients would
/// underflow without one (f16).
///
/// Where there is a scaler it keeps what `unscaled` gives, the flattened and detached loss, until the step: to explain it
/// should it overflow.
pub(crate) fn active_scale<I: Backend>(
    device: &Device<I>,
    needs: bool,
    unscaled: impl FnOnce() -> Tensor<I, 1>,
) -> ActiveScale<I> {
    if let Some(scale) = REPEATED.get() {
        let inv = inverse(scale);
        return ActiveScale::Host { scale, inv };
    }
    let found = registry::lookup::<I>(device, needs);
    let Some(scaler) = found.filter(|scaler| scaler.is_enabled()) else {
        return ActiveScale::None;
    };
    let mut state = scaler.lock();
    let on_device = state.possible::<I>();
    let scale = on_device.map(|possible| possible.active(device));
    let scale = scale.unwrap_or_else(|| {
        // No step is pending, or one of another backend is.
        state.settle();
        let scale = state.scale();
        ActiveScale::Host {
            scale,
            inv: inverse(scale),
        }
    });
    state.observe(LossProbe::new(unscaled()));
    scale
}

#[cfg(test)]
mod tests {
    use std::{sync::Barrier, thread};

    use burn::{
        backend::Autodiff,
        module::Param,
        nn::{Linear, LinearConfig},
        optim::{GradientsParams, Optimizer, SgdConfig},
    };
    use burn_flex::Flex;

    use super::*;
    use crate::{AmpError, Detection, GradScaler, GradScalerConfig, OverflowCause};

    type B = Autodiff<Flex>;

    fn model() -> Linear<B> {
        let model = LinearConfig::new(1, 1)
            .with_bias(false)
            .init(&Default::default());
        Linear {
            weight: Param::from_data([[1.0_f32]], &Default::default()),
            ..model
        }
    }

    /// The gradients of a model, `scale` times too large for f32 if `scale` is infinite.
    fn gradients(model: &Linear<B>, scale: f32) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Flex, 2>::full([1, 1], scale, &Default::default());
        gradients.register(model.weight.id, gradient);
        gradients
    }

    fn scaler(init_scale: f32) -> GradScaler {
        let config = GradScalerConfig {
            init_scale,
            growth_interval: 3,
            ..Default::default()
        };
        GradScaler::new(&config).unwrap()
    }

    /// The scale that `backward` would use here, wherever it is.
    fn active() -> Option<(f32, f32)> {
        match scale_of(1.0) {
            ActiveScale::None => None,
            ActiveScale::Host { scale, inv } => Some((scale, inv)),
            ActiveScale::Device { scale, inv } => Some((scale.into_scalar(), inv.into_scalar())),
        }
    }

    fn scale_of(loss: f32) -> ActiveScale<Flex> {
        let device = Default::default();
        active_scale(&device, true, || Tensor::from_data([loss], &device))
    }

    #[test]
    fn each_thread_uses_the_scaler_that_it_made() {
        let both = Barrier::new(2);
        let run = |init_scale: f32| {
            let scaler = scaler(init_scale);
            both.wait();
            assert_eq!(active(), Some((init_scale, 1.0 / init_scale)));

            // The two share the device; only this thread's scale backs off.
            let mut optimizer = scaler.wrap(SgdConfig::new().init());
            let model = model();
            let gradients = gradients(&model, f32::NAN);
            let _: Linear<B> = optimizer.step(0.1, model, gradients);
            both.wait();
            assert_eq!(active(), Some((init_scale / 2.0, 2.0 / init_scale)));
        };
        thread::scope(|scope| {
            scope.spawn(|| run(1024.0));
            scope.spawn(|| run(64.0));
        });
    }

    #[test]
    fn a_worker_thread_joins_a_run_by_binding() {
        let scaler = scaler(256.0);
        thread::scope(|scope| {
            scope.spawn(|| {
                scaler.bind_thread();
                assert_eq!(active(), Some((256.0, 1.0 / 256.0)));
            });
        });
    }

    #[test]
    fn a_disabled_scaler_scales_nothing() {
        let _scaler = GradScaler::disabled();
        assert_eq!(active(), None);
    }

    #[test]
    fn the_device_computes_the_scale_that_the_host_would() {
        let trace = |detection| {
            let scaler = scaler(8.0).with_detection(detection);
            let mut optimizer = scaler.wrap(SgdConfig::new().init());
            let mut model = model();
            [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1].map(|overflows| {
                let scale = if overflows == 1 { f32::INFINITY } else { 1.0 };
                let gradients = gradients(&model, scale);
                model = optimizer.step(0.1, model.clone(), gradients);
                let on_device = matches!(scale_of(1.0), ActiveScale::Device { .. });
                assert_eq!(on_device, detection == Detection::Deferred);
                active()
            })
        };
        assert_eq!(trace(Detection::Sync), trace(Detection::Deferred));
    }

    #[test]
    fn a_non_finite_loss_is_told_apart_from_an_overflow() {
        for detection in [Detection::Sync, Detection::Deferred] {
            let scaler = scaler(8.0).with_detection(detection);
            let mut optimizer = scaler.wrap(SgdConfig::new().init());
            let mut step = |loss, scale| {
                scale_of(loss);
                let model = model();
                let gradients = gradients(&model, scale);
                let _: Linear<B> = optimizer.step(0.1, model, gradients);
                scaler.last_overflow().map(|overflow| overflow.cause)
            };
            assert_eq!(step(1.0, 1.0), None);
            assert_eq!(step(1.0, f32::INFINITY), Some(OverflowCause::Gradient));
            assert_eq!(step(f32::NAN, f32::NAN), Some(OverflowCause::NonFiniteLoss));
            assert_eq!(
                step(2.0, f32::NAN),
                Some(OverflowCause::Gradient),
                "losses are forgotten"
            );
            // Not the first steps, which are skipped without an error.
            assert_eq!(scaler.error(), None);
        }
    }

    #[test]
    fn a_loss_that_is_nan_from_the_first_step_stops_training() {
        for detection in [Detection::Sync, Detection::Deferred] {
            let interrupter = burn::train::Interrupter::new();
            let scaler = scaler(1024.0)
                .with_detection(detection)
                .with_interrupter(interrupter.clone());
            let mut optimizer = scaler.wrap(SgdConfig::new().init());
            let mut step = || {
                scale_of(f32::NAN);
                let model = model();
                let gradients = gradients(&model, f32::NAN);
                let _: Linear<B> = optimizer.step(0.1, model, gradients);
                scaler.error()
            };
            assert_eq!(step(), None);
            assert_eq!(step(), None);
            let error = AmpError::NonFiniteLoss {
                step: 3,
                scale: 256.0,
                attempts: 3,
            };
            assert_eq!(step(), Some(error.clone()));
            assert!(interrupter.should_stop());
            assert_eq!(interrupter.get_message(), Some(error.to_string()));
        }
    }
}
