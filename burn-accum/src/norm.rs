//! The global norm of the last update's gradient: a handle and a metric.

use burn::tensor::{Tensor, backend::Backend};
use burn_decorator::gauge::Gauge;
use burn_decorator::gauge_metric;
use burn_decorator::ranks::{ForRank, Shared};
use parking_lot::Mutex;

/// The gradient norm of a [`ClipNorm`](crate::ClipNorm): a handle that stays valid when the update
/// moves into a `Learner`. Clones, of the handle and of the update, share it.
#[derive(Clone, Default)]
pub struct GradNorm {
    shared: Shared<Norms>,
}

#[derive(Default)]
struct Norms {
    last: Mutex<Last>,
    /// Held by who waits for the device, so that others wait for the norm too.
    reading: Mutex<()>,
}

impl ForRank for Norms {
    /// A new handle, without the norm of any update.
    fn for_rank(&self) -> Self {
        Self::default()
    }
}

/// The last norm, on the host or on a device.
#[derive(Default)]
enum Last {
    #[default]
    None,
    OnDevice(Box<dyn FnOnce() -> f32 + Send>),
    Known(f32),
}

impl GradNorm {
    /// The norm over all parameters before it was clipped (what `torch.nn.utils.clip_grad_norm_`
    /// returns); `None` before the first update. The first call after an update waits for the
    /// device, further ones do not.
    pub fn last(&self) -> Option<f32> {
        let _reading = self.shared.reading.lock();
        let last = {
            let mut last = self.shared.last.lock();
            match *last {
                Last::Known(norm) => return Some(norm),
                _ => core::mem::take(&mut *last),
            }
        };
        // Not under the lock of the value, which the thread that trains takes for the next norm.
        let norm = match last {
            Last::OnDevice(read) => read(),
            _ => return None,
        };
        let mut last = self.shared.last.lock();
        if matches!(*last, Last::None) {
            *last = Last::Known(norm);
        }
        Some(norm)
    }

    pub(crate) fn publish<I: Backend>(&self, norm: Tensor<I, 1>) {
        let read = move || norm.into_data().iter::<f32>().next().unwrap_or(f32::NAN);
        *self.shared.last.lock() = Last::OnDevice(Box::new(read));
    }
}

impl core::fmt::Debug for GradNorm {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("GradNorm").finish_non_exhaustive()
    }
}

/// The gradient norm of the last update, before clipping; NaN before the first one. An epoch's
/// value is Burn's mean over its batches, without those before the first update.
#[derive(Clone)]
pub struct GradNormMetric(Gauge);

impl GradNormMetric {
    /// The metric of `norm`: see [`ClipNorm::norm`](crate::ClipNorm::norm).
    pub fn new(norm: &GradNorm) -> Self {
        let norm = norm.clone();
        let read = move || norm.last().map_or(f64::NAN, f64::from);
        let about = "L2 norm of the last update's gradient over all parameters, before clipping";
        Self(Gauge::new("Gradient Norm", about, f64::NAN, read).format(|norm| format!("{norm:.4}")))
    }
}

impl GradNormMetric {
    /// For the metrics of a training.
    pub(crate) fn into_gauge(self) -> Gauge {
        self.0
    }
}

gauge_metric!(GradNormMetric);
