//! The Learner's metrics as curves.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use burn::train::logger::MetricLogger;
use burn::train::metric::store::{EpochSummary, MetricsUpdate, Split};
use burn::train::metric::{MetricDefinition, MetricId, NumericEntry};

use crate::event::EventFile;

/// How long a point may stay in a buffer.
const FLUSH_AFTER: Duration = Duration::from_secs(2);

/// Writes every numeric metric to TensorBoard event files, and passes everything on to the wrapped
/// logger, from which the Learner reads.
///
/// A point of training is a batch's value, at the number of training steps so far. A point of
/// validation is the mean over an epoch.
pub struct TensorBoard<L> {
    inner: L,
    directory: PathBuf,
    names: HashMap<MetricId, String>,
    runs: HashMap<String, Run>,
    step: u64,
}

/// The curves of a split.
struct Run {
    file: EventFile,
    flushed: Instant,
    /// Means over the epoch so far.
    means: HashMap<MetricId, f64>,
}

impl<L: MetricLogger> TensorBoard<L> {
    /// Writes to a directory for each split in `directory`, beside existing files.
    ///
    /// # Errors
    ///
    /// The directory or the file of training cannot be made.
    pub fn new(inner: L, directory: impl Into<PathBuf>) -> io::Result<Self> {
        let mut logger = Self {
            inner,
            directory: directory.into(),
            names: HashMap::new(),
            runs: HashMap::new(),
            step: 0,
        };
        run(&mut logger.runs, &logger.directory, &Split::Train)?;
        Ok(logger)
    }

    /// Counts training steps from `steps` on, for a training that resumes from a record.
    pub fn with_steps(mut self, steps: u64) -> Self {
        self.step = steps;
        self
    }

    /// The wrapped logger.
    pub fn into_inner(self) -> L {
        self.inner
    }

    fn write(&mut self, update: &MetricsUpdate, split: &Split) -> io::Result<()> {
        let run = run(&mut self.runs, &self.directory, split)?;
        let metrics = &update.entries_numeric;
        if *split == Split::Train {
            let named = metrics.iter().filter_map(|metric| {
                let name = self.names.get(&metric.entry.metric_id)?;
                Some((name.as_str(), value(&metric.numeric_entry)?))
            });
            run.file.scalars(self.step, named)?;
        } else {
            let means = metrics.iter().filter_map(|metric| {
                let mean = value(&metric.running_entry)?;
                Some((metric.entry.metric_id.clone(), mean))
            });
            run.means.extend(means);
        }
        if run.flushed.elapsed() > FLUSH_AFTER {
            run.flushed = Instant::now();
            run.file.flush()?;
        }
        Ok(())
    }

    fn end_epoch(&mut self, split: &Split) -> io::Result<()> {
        let run = run(&mut self.runs, &self.directory, split)?;
        let means = std::mem::take(&mut run.means);
        let named = means.iter().filter_map(|(id, mean)| {
            let name = self.names.get(id)?;
            Some((name.as_str(), *mean))
        });
        if !means.is_empty() {
            run.file.scalars(self.step, named)?;
        }
        run.file.flush()
    }
}

/// The curves of a split, begun if there are none.
fn run<'a>(
    runs: &'a mut HashMap<String, Run>,
    directory: &Path,
    split: &Split,
) -> io::Result<&'a mut Run> {
    match runs.entry(split.to_string()) {
        Entry::Occupied(run) => Ok(run.into_mut()),
        Entry::Vacant(place) => {
            let file = EventFile::create(&directory.join(place.key()))?;
            Ok(place.insert(Run {
                file,
                flushed: Instant::now(),
                means: HashMap::new(),
            }))
        }
    }
}

/// The value of a batch or an epoch, if it has one.
fn value(entry: &NumericEntry) -> Option<f64> {
    match entry {
        NumericEntry::Aggregated { count: 0, .. } => None,
        _ => Some(entry.current()),
    }
}

/// Logs an error, such as a full disk, which ends the curves but not the training.
fn warn(written: io::Result<()>) {
    if let Err(error) = written {
        burn_decorator::warn_user!("a TensorBoard event file is not written: {error}");
    }
}

impl<L: MetricLogger> MetricLogger for TensorBoard<L> {
    fn log(&mut self, update: MetricsUpdate, epoch: usize, split: &Split) {
        if *split == Split::Train {
            self.step += 1;
        }
        warn(self.write(&update, split));
        self.inner.log(update, epoch, split);
    }

    fn read_numeric(
        &mut self,
        name: &str,
        epoch: usize,
        split: &Split,
    ) -> Result<Vec<NumericEntry>, String> {
        self.inner.read_numeric(name, epoch, split)
    }

    fn log_metric_definition(&mut self, definition: MetricDefinition) {
        self.names
            .insert(definition.metric_id.clone(), definition.name.clone());
        self.inner.log_metric_definition(definition);
    }

    fn log_epoch_summary(&mut self, summary: EpochSummary) {
        warn(self.end_epoch(&summary.split));
        self.inner.log_epoch_summary(summary);
    }
}
