//! Metrics for the Learner. They read the scaler's shared state, so the model's output types stay
//! as they are.

use burn_decorator::gauge::Gauge;
use burn_decorator::gauge_metric;

use super::GradScaler;

/// The loss scale after each batch; 1 if the scaler is disabled. An epoch's value is Burn's mean
/// over its batches.
///
/// It does not ask the device: in an update with an accumulation it lags up to a window.
#[derive(Clone)]
pub struct LossScaleMetric(Gauge);

/// The number of steps skipped so far, since the beginning of the training, of an update
/// with an accumulation that of its micro-batches; 0 if the scaler is disabled.
///
/// It does not ask the device: in an update with an accumulation it lags up to a window.
#[derive(Clone)]
pub struct SkippedStepsMetric(Gauge);

impl LossScaleMetric {
    /// The metric of `scaler`.
    pub fn new(scaler: &GradScaler) -> Self {
        let scaler = scaler.clone();
        let read = move || f64::from(scaler.shared.lock().scale());
        let about = "The factor that losses are multiplied with before the backward pass";
        Self(Gauge::new("Loss Scale", about, read(), read).rising())
    }
}

impl SkippedStepsMetric {
    /// The metric of `scaler`.
    pub fn new(scaler: &GradScaler) -> Self {
        let scaler = scaler.clone();
        let read = move || scaler.shared.lock().counters.skipped as f64;
        let about = "Optimizer steps that were skipped because of non-finite gradients";
        Self(Gauge::new("Skipped Steps", about, read(), read).unit("steps"))
    }
}

/// What a training shows of a scaler.
pub(crate) fn gauges(scaler: &GradScaler) -> Vec<Gauge> {
    vec![
        LossScaleMetric::new(scaler).0,
        SkippedStepsMetric::new(scaler).0,
    ]
}

gauge_metric!(LossScaleMetric);
gauge_metric!(SkippedStepsMetric);
