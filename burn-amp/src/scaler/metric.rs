//! What the Learner shows. Both metrics read the scaler's shared state, so the model's output types stay as they are.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use super::GradScaler;

/// The loss scale after each batch; 1 if the scaler is disabled. An epoch's value is the last one, not a mean.
///
/// It does not ask the device: under [`Detection::Deferred`](crate::Detection::Deferred) it lags one step.
#[derive(Clone)]
pub struct LossScaleMetric {
    scaler: GradScaler,
    name: MetricName,
    scale: f64,
}

/// The number of steps skipped so far, since the beginning of the training; 0 if the scaler is disabled.
///
/// It does not ask the device: under [`Detection::Deferred`](crate::Detection::Deferred) it lags one step.
#[derive(Clone)]
pub struct SkippedStepsMetric {
    scaler: GradScaler,
    name: MetricName,
    skipped: f64,
}

impl LossScaleMetric {
    /// The metric of `scaler`.
    pub fn new(scaler: &GradScaler) -> Self {
        Self {
            scaler: scaler.clone(),
            name: Arc::new("Loss Scale".to_owned()),
            scale: f64::from(scaler.state().scale()),
        }
    }
}

impl SkippedStepsMetric {
    /// The metric of `scaler`.
    pub fn new(scaler: &GradScaler) -> Self {
        Self {
            scaler: scaler.clone(),
            name: Arc::new("Skipped Steps".to_owned()),
            skipped: scaler.state().counters.skipped as f64,
        }
    }
}

impl Metric for LossScaleMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("The factor that losses are multiplied with before the backward pass".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        attributes(None, true)
    }

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        self.scale = f64::from(self.scaler.state().scale());
        entry(self.scale)
    }

    /// Nothing is accumulated over an epoch.
    fn clear(&mut self) {}
}

impl Metric for SkippedStepsMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn description(&self) -> Option<String> {
        Some("Optimizer steps that were skipped because of non-finite gradients".to_owned())
    }

    fn attributes(&self) -> MetricAttributes {
        attributes(Some("steps"), false)
    }

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        self.skipped = self.scaler.state().counters.skipped as f64;
        entry(self.skipped)
    }

    /// Nothing is accumulated over an epoch.
    fn clear(&mut self) {}
}

impl Numeric for LossScaleMetric {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.scale)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

impl Numeric for SkippedStepsMetric {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.skipped)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

fn attributes(unit: Option<&str>, higher_is_better: bool) -> MetricAttributes {
    NumericAttributes {
        unit: unit.map(str::to_owned),
        higher_is_better,
    }
    .into()
}

fn entry(value: f64) -> SerializedEntry {
    SerializedEntry::new(value.to_string(), NumericEntry::Value(value).serialize())
}
