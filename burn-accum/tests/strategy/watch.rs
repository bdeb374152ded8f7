//! Sees all that a training shows: metrics in the logger, and progress in the renderer.

use std::{
    error::Error,
    sync::{Arc, Mutex},
};

use burn::train::{
    LearnerSummary,
    logger::{InMemoryMetricLogger, MetricLogger},
    metric::{
        Metric, MetricDefinition, MetricEntry, MetricMetadata, MetricName, NumericEntry,
        SerializedEntry,
        store::{EpochSummary, MetricsUpdate, Split},
    },
    renderer::{
        EvaluationName, EvaluationProgress, MetricState, MetricsRenderer,
        MetricsRendererEvaluation, MetricsRendererTraining, ProgressType, TrainingProgress,
    },
};

/// What was seen, in order. Burn logs metrics from another thread than it renders from.
#[derive(Clone, Default)]
pub struct Watch {
    shown: Lines,
    logged: Lines,
}

type Lines = Arc<Mutex<Vec<String>>>;

impl Watch {
    /// What was rendered, and what was logged.
    pub fn lines(&self) -> [Vec<String>; 2] {
        [self.shown(""), self.logged("")]
    }

    /// The lines of the renderer that begin with `prefix`, without it.
    pub fn shown(&self, prefix: &str) -> Vec<String> {
        after(prefix, &self.shown)
    }

    /// The lines of the logger that begin with `prefix`, without it.
    pub fn logged(&self, prefix: &str) -> Vec<String> {
        after(prefix, &self.logged)
    }

    /// The learning rate of each training item.
    pub fn learning_rates(&self) -> Vec<f64> {
        let lines = self.logged("train ");
        let rates = lines
            .iter()
            .filter_map(|line| line.rsplit_once("Some(")?.1.strip_suffix(')'));
        rates.map(|rate| rate.parse().unwrap()).collect()
    }

    pub fn renderer(&self) -> WatchedRenderer {
        WatchedRenderer(self.shown.clone())
    }

    pub fn logger(&self) -> WatchedLogger {
        WatchedLogger {
            lines: self.logged.clone(),
            memory: InMemoryMetricLogger::new(),
        }
    }
}

fn after(prefix: &str, lines: &Lines) -> Vec<String> {
    let lines = lines.lock().unwrap();
    let after = lines.iter().filter_map(|line| line.strip_prefix(prefix));
    after.map(str::to_owned).collect()
}

/// Remembers the values as well: early stopping reads them. Burn's files are read before they are
/// written, sometimes.
pub struct WatchedLogger {
    lines: Lines,
    memory: InMemoryMetricLogger,
}

impl WatchedLogger {
    fn see(&self, line: String) {
        self.lines.lock().unwrap().push(line);
    }
}

impl MetricLogger for WatchedLogger {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        let text =
            |entry: &MetricEntry, value| format!("{split} {epoch} {:?} {value}", entry.metric_id);
        let texts = update.entries.iter().map(|entry| {
            let value = entry.serialized_entry.serialized.clone();
            text(entry, value)
        });
        let numbers = update.entries_numeric.iter().map(|numeric| {
            let values = format!("{:?} {:?}", numeric.numeric_entry, numeric.running_entry);
            text(&numeric.entry, values)
        });
        // Burn keeps metrics in the random order of a hash map.
        let mut lines: Vec<_> = texts.chain(numbers).collect();
        lines.sort();
        lines.into_iter().for_each(|line| self.see(line));
        self.memory.log(update, epoch, split);
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        self.memory.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.memory.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        self.see(format!("end {} {}", summary.epoch_number, summary.split));
        self.memory.log_epoch_summary(summary);
    }
}

pub struct WatchedRenderer(Lines);

impl WatchedRenderer {
    fn see(&self, line: String) {
        self.0.lock().unwrap().push(line);
    }

    fn see_progress(&self, split: &str, item: &TrainingProgress, indicators: Vec<ProgressType>) {
        let show = |indicator| match indicator {
            ProgressType::Value { tag, value } => format!("{tag} {value}"),
            ProgressType::Detailed { tag, progress } => {
                let (done, all) = (progress.items_processed, progress.items_total);
                format!("{tag} {done}/{all}")
            }
        };
        let indicators: Vec<_> = indicators.into_iter().map(show).collect();
        self.see(format!("{split}: {}", indicators.join(", ")));
        self.see(format!("item {split}: {item:?}"));
    }
}

impl MetricsRendererTraining for WatchedRenderer {
    fn update_train(&mut self, _: MetricState) {}

    fn update_valid(&mut self, _: MetricState) {}

    fn render_train(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.see_progress("train", &item, indicators);
    }

    fn render_valid(&mut self, item: TrainingProgress, indicators: Vec<ProgressType>) {
        self.see_progress("valid", &item, indicators);
    }

    fn on_train_end(&mut self, summary: Option<LearnerSummary>) -> Result<(), Box<dyn Error>> {
        let epochs = summary.map(|summary| summary.epochs);
        self.see(format!("ended, summary of epochs: {epochs:?}"));
        Ok(())
    }
}

impl MetricsRendererEvaluation for WatchedRenderer {
    fn update_test(&mut self, _: EvaluationName, _: MetricState) {}

    fn render_test(&mut self, _: EvaluationProgress, _: Vec<ProgressType>) {}
}

impl MetricsRenderer for WatchedRenderer {
    fn manual_close(&mut self) {}

    /// In the random order of a hash map.
    fn register_metric(&mut self, _: MetricDefinition) {}
}

/// The metadata that metrics are given.
#[derive(Clone, Default)]
pub struct MetadataMetric;

impl Metric for MetadataMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        Arc::new("Metadata".to_owned())
    }

    fn update(&mut self, _: &(), metadata: &MetricMetadata) -> SerializedEntry {
        let MetricMetadata {
            progress,
            global_progress,
            iteration,
            lr,
        } = metadata;
        let text = format!("{progress:?} {global_progress:?} {iteration:?} {lr:?}");
        SerializedEntry::new(text.clone(), text)
    }

    fn clear(&mut self) {}
}
