//! The scale that `backward` uses.

use std::any::Any;
use std::sync::Arc;

use burn::tensor::{Device, Tensor, backend::Backend};
use burn_decorator::carried::{carry, is_carried, with};
use burn_decorator::non_finite::{exact, on};

use super::handle::GradScaler;
use super::pending::{Factor, inverse};
use super::state::Shared;
use super::{overflow::LossProbe, registry};
use crate::FirstNonFinite;
use crate::cast::Lineage;

/// Whose a loss is: what the caller of `backward` says, which has no argument for it.
#[derive(Clone)]
pub(crate) enum Said {
    /// This scaler's.
    Scaler(GradScaler),
    /// Nobody's, and it is multiplied with this.
    Scale(f32),
    /// Nobody's: it is not scaled.
    Unscaled,
}

/// Runs `backward`, in which losses are whose `said` says.
pub(crate) fn saying<R>(said: Said, backward: impl FnOnce() -> R) -> R {
    carry(said, backward).0
}

/// What was seen of a step: whether a loss or a gradient was non-finite, and what the loss was
/// multiplied with.
#[derive(Default)]
pub(crate) struct Seen {
    /// A [`Total`], of the backend of the step.
    total: Option<Box<dyn Any>>,
    read: Option<fn(Box<dyn Any>) -> bool>,
    scale: Option<f32>,
    scaler: Option<Arc<Shared>>,
}

/// A number that is finite if and only if all losses and gradients so far are.
struct Total<I: Backend>(Tensor<I, 1>);

/// Runs `step` and tells what was seen of it.
pub(crate) fn watching<R>(step: impl FnOnce() -> R) -> (R, Seen) {
    let (result, seen) = carry(Seen::default(), step);
    (result, seen.unwrap_or_default())
}

/// Whether this thread watches a step.
pub(crate) fn is_watching() -> bool {
    is_carried::<Seen>()
}

/// Adds a loss, or a gradient that is read, to what is seen of the step.
pub(crate) fn see<I: Backend>(tensor: Tensor<I, 1>) {
    with(|seen: &mut Seen| {
        let one = exact(tensor);
        let before = seen.total.take().and_then(|total| total.downcast().ok());
        let total = match before {
            None => one,
            Some(before) => {
                let Total::<I>(before) = *before;
                on(one, &before.device()) + before
            }
        };
        seen.total = Some(Box::new(Total(total)));
        seen.read = Some(|total| {
            let total = total.downcast::<Total<I>>().expect("of this backend");
            let mut values = total.0.into_data().iter::<f64>().collect::<Vec<_>>();
            values.retain(|value| !value.is_finite());
            !values.is_empty()
        });
    });
}

impl Seen {
    /// Whether a loss or a gradient was infinite or NaN. A host read.
    pub(crate) fn found_non_finite(&mut self) -> bool {
        let total = self.read.zip(self.total.take());
        total.is_some_and(|(read, total)| read(total))
    }

    /// What losses are said to be, to run the step as it ran.
    pub(crate) fn said(&self) -> Said {
        self.scale.map_or(Said::Unscaled, Said::Scale)
    }

    /// Tells the scaler of the step, if it had one, what was found.
    pub(crate) fn tell(&self, found: Option<FirstNonFinite>) {
        if let Some(scaler) = &self.scaler {
            scaler.lock().first_non_finite = found;
        }
    }
}

/// The scale for a loss on `device` that is about to be differentiated on this thread, and its
/// inverse for the gradients; `needs` if these would underflow without one (f16).
///
/// Where there is a scaler it keeps what `unscaled` gives, the flattened and detached loss, until
/// the step: to explain it should it overflow.
pub(crate) fn active_scale<I: Backend>(
    device: &Device<I>,
    lineage: Lineage,
    needs: bool,
    unscaled: impl FnOnce() -> Tensor<I, 1>,
) -> [Factor<Tensor<I, 1>>; 2] {
    let on_host = |scale: f32| [Factor::Host(scale), Factor::Host(inverse(scale))];
    let scaler = match with(|said: &mut Said| said.clone()) {
        Some(Said::Scale(scale)) => return on_host(scale),
        Some(Said::Unscaled) => None,
        Some(Said::Scaler(scaler)) => {
            scaler.shared().found(lineage, true);
            Some(scaler.shared().clone())
        }
        None => registry::lookup(lineage, needs),
    };
    let Some(scaler) = scaler else {
        return [Factor::None, Factor::None];
    };
    let mut state = scaler.lock();
    if !state.is_enabled() {
        return [Factor::None, Factor::None];
    }
    let watches = is_watching();
    let on_device = state.possible::<I>().filter(|_| !watches);
    let scale = match on_device.map(|possible| possible.active(device)) {
        Some(scale) => scale,
        None => {
            // No step is pending, or one of another backend is, or the step may have to run again
            // at its scale.
            state.settle();
            let scale = state.scale();
            with(|seen: &mut Seen| {
                (seen.scale, seen.scaler) = (Some(scale), Some(scaler.clone()));
            });
            on_host(scale)
        }
    };
    state.observe(LossProbe::new(unscaled()));
    scale
}
