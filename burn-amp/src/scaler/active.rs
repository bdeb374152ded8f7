//! The scale that `backward` uses.

use std::cell::Cell;

use burn::tensor::{Device, Tensor, backend::Backend};
use burn_decorator::cell::Scope;

use super::deferred::{Factor, inverse};
use super::{overflow::LossProbe, registry, state::LastStep};

thread_local! {
    static REPEATED: Cell<Option<f32>> = const { Cell::new(None) };
}

/// Whether this thread's scaler wants the step that begins to be [kept](keep_step), because no overflow has been explained yet. Waits for
/// the outcome of the step before, and runs that once more, at its scale and out of the scaler's sight, if it overflowed.
pub(crate) fn wants_step() -> bool {
    let Some(scaler) = registry::of_thread() else {
        return false;
    };
    let mut state = scaler.settled();
    if !state.is_enabled() || state.is_explained {
        return false;
    }
    let overflow = state.last_overflow.as_ref().map(|overflow| overflow.scale);
    let overflow = overflow.filter(|_| state.counters.skipped_in_a_row > 0);
    let Some((scale, last)) = overflow.zip(state.last_step.take()) else {
        return true;
    };
    drop(state);
    let scope = Scope::enter(&REPEATED, Some(scale));
    let first = last();
    drop(scope);
    match &first {
        Some(first) => log::warn!("the skipped step, run once more: {first}"),
        None => log::warn!(
            "the skipped step, run once more, did not overflow, or there is no burn_amp::Watch below autodiff"
        ),
    }
    let mut state = scaler.settled();
    (state.is_explained, state.first_non_finite) = (true, first);
    false
}

/// Keeps a step until its outcome is known.
pub(crate) fn keep_step(step: LastStep) {
    if let Some(scaler) = registry::of_thread() {
        scaler.settled().last_step = Some(step);
    }
}

/// The scale for a loss on `device` that is about to be differentiated on this thread, and its inverse for the gradients; `needs` if these
/// would underflow without one (f16).
///
/// Where there is a scaler it keeps what `unscaled` gives, the flattened and detached loss, until the step: to explain it
/// should it overflow.
pub(crate) fn active_scale<I: Backend>(
    device: &Device<I>,
    needs: bool,
    unscaled: impl FnOnce() -> Tensor<I, 1>,
) -> [Factor<Tensor<I, 1>>; 2] {
    let on_host = |scale: f32| [Factor::Host(scale), Factor::Host(inverse(scale))];
    if let Some(scale) = REPEATED.get() {
        return on_host(scale);
    }
    let Some(scaler) = registry::lookup::<I>(device, needs) else {
        return [Factor::None, Factor::None];
    };
    let mut state = scaler.lock();
    if !state.is_enabled() {
        return [Factor::None, Factor::None];
    }
    let on_device = state
        .possible::<I>()
        .map(|possible| possible.active(device));
    let scale = on_device.unwrap_or_else(|| {
        // No step is pending, or one of another backend is.
        state.settle();
        on_host(state.scale())
    });
    state.observe(LossProbe::new(unscaled()));
    scale
}
