//! The metrics of a run: Burn's files, a line an epoch, and the losses for the report.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

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
    pub train: f64,
    /// Mean over the held-out sequences, after the last update.
    pub valid: f64,
}

/// Burn's metric logger, which is also told with which epoch a training begins.
pub struct Log {
    files: FileMetricLogger,
    first_epoch: usize,
    loss: MetricId,
    losses: EpochLosses,
    epochs: Sender<EpochLosses>,
    /// When the training began, if lines are printed.
    printing: Option<Instant>,
}

impl Log {
    /// A logger into files below a directory, and the losses of each epoch that it sees to its end.
    pub fn new(files: &Path, first_epoch: usize, prints: bool) -> (Self, Receiver<EpochLosses>) {
        let (epochs, receiver) = channel();
        let log = Self {
            files: FileMetricLogger::new(files),
            first_epoch,
            loss: MetricId::new(Arc::new("Loss".into())),
            losses: EpochLosses::default(),
            epochs,
            printing: prints.then(Instant::now),
        };
        (log, receiver)
    }
}

impl MetricLogger for Log {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let mut metrics = update.entries_numeric.iter();
        if let Some(loss) = metrics.find(|metric| metric.entry.metric_id == self.loss) {
            let mean = loss.running_entry.current();
            match split {
                Split::Valid => self.losses.valid = mean,
                _ => self.losses.train = mean,
            }
        }
        // Burn counts the epochs of metrics from 1 also in a training that is resumed, and would
        // write over the files of the first.
        self.files.log(update, epoch.max(self.first_epoch), split);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        if summary.split == Split::Valid {
            self.losses.epoch = summary.epoch_number;
            if let Some(began) = self.printing {
                let (losses, seconds) = (&self.losses, began.elapsed().as_secs());
                let (train, valid) = (losses.train, losses.valid);
                let head = format!("{seconds:5} s  epoch {}", losses.epoch);
                println!("{head}  training loss {train:.4}  validation loss {valid:.4}");
            }
            // The receiver is gone only if the training has panicked.
            let _ = self.epochs.send(self.losses);
        }
        self.files.log_epoch_summary(summary);
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
}
