//! The losses of a run, epoch by epoch.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex};

use burn::train::logger::{FileMetricLogger, MetricLogger};
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};
use serde::{Deserialize, Serialize};

/// Mean losses of an epoch, in nats a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EpochLosses {
    /// Counted from 1.
    pub epoch: usize,
    /// Mean over the batches of training, each before its update.
    pub train: Option<f64>,
    /// Mean over the held-out windows, after the last update.
    pub valid: Option<f64>,
}

/// Keeps the losses that the metric logger of the run sees.
#[derive(Clone, Debug, Default)]
pub struct History(Arc<Mutex<BTreeMap<usize, EpochLosses>>>);

impl History {
    /// The epochs so far.
    pub fn epochs(&self) -> Vec<EpochLosses> {
        let epochs = self.0.lock().expect("no holder panics");
        epochs.values().copied().collect()
    }

    /// A logger that writes the metrics to files under the directory, as Burn's default one, and keeps the losses here.
    pub fn logger(&self, directory: &Path, first_epoch: usize) -> impl MetricLogger + use<> {
        Logger {
            history: self.clone(),
            files: FileMetricLogger::new(directory),
            first_epoch,
            loss: MetricId::new(Arc::new("Loss".into())),
        }
    }

    fn set(&self, epoch: usize, split: &Split, loss: f64) {
        let mut epochs = self.0.lock().expect("no holder panics");
        let losses = epochs.entry(epoch).or_default();
        losses.epoch = epoch;
        match split {
            Split::Train => losses.train = Some(loss),
            Split::Valid => losses.valid = Some(loss),
            Split::Test(_) => {}
        }
    }
}

struct Logger {
    history: History,
    files: FileMetricLogger,
    first_epoch: usize,
    loss: MetricId,
}

impl Logger {
    /// Burn's event store counts epochs from 1 also in a training that is resumed, and would write the metrics of the
    /// first epoch after the break over those of the first of all.
    fn epoch(&self, counted: usize) -> usize {
        counted.max(self.first_epoch)
    }
}

impl MetricLogger for Logger {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let epoch = self.epoch(epoch);
        let losses = update.entries_numeric.iter();
        for loss in losses.filter(|metric| metric.entry.metric_id == self.loss) {
            self.history.set(epoch, split, loss.running_entry.current());
        }
        self.files.log(update, epoch, split);
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        self.files.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.files.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.files.log_epoch_summary(summary);
    }
}
