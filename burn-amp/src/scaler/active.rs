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
