//! How fast a training goes, and what else people look at: the usual metrics of the Learner.

use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::train::{LearningComponentsTypes, MetricRegistration, SupervisedTraining};
use burn_decorator::gauge::Gauge;
use parking_lot::Mutex;

/// Says how many bytes are in use.
type BytesInUse = dyn Fn() -> u64 + Send + Sync;

/// How fast the last step was, on rank 0, and what it left in memory. Clones share it.
#[derive(Clone, Default)]
pub(super) struct Pace {
    last: Arc<Mutex<Option<LastStep>>>,
    bytes_in_use: Option<Arc<BytesInUse>>,
}

/// One step.
#[derive(Clone, Copy, Debug)]
struct LastStep {
    /// From the end of the step before.
    whole: Duration,
    /// Of it, for the batch.
    waiting: Duration,
    /// Of all ranks.
    items: usize,
    /// Bytes in use after it, if something says them.
    bytes_in_use: Option<u64>,
}

impl LastStep {
    /// Of so many seconds, at least a nanosecond.
    fn seconds(&self) -> f64 {
        self.whole.max(Duration::from_nanos(1)).as_secs_f64()
    }
}

impl Pace {
    /// Asks `read` after each step, on the thread that trains.
    pub(super) fn reads_bytes_in_use(&mut self, read: Arc<BytesInUse>) {
        self.bytes_in_use = Some(read);
    }

    /// The usual metrics of speed, and of memory if something says the bytes in use.
    pub(super) fn gauges(&self) -> Vec<Gauge> {
        let read = |value: fn(&LastStep) -> f64| {
            let last = self.last.clone();
            move || last.lock().as_ref().map_or(f64::NAN, value)
        };
        let step_time = Gauge::new(
            "Step Time",
            "From the end of one step to the end of the next, without validation and records",
            f64::NAN,
            read(|step| step.seconds() * 1e3),
        );
        let items = Gauge::new(
            "Items per Second",
            "Items of the data loaders of all ranks",
            f64::NAN,
            read(|step| step.items as f64 / step.seconds()),
        );
        let waiting = Gauge::new(
            "Waiting for Data",
            "The share of the step time in which the next batch is waited for",
            f64::NAN,
            read(|step| 100.0 * step.waiting.as_secs_f64() / step.seconds()),
        );
        let tenths = |value: f64| format!("{value:.1}");
        let mut gauges = vec![
            step_time.unit("ms").format(tenths),
            items.unit("items/s").rising().format(tenths),
            waiting.unit("%").format(tenths),
        ];
        if self.bytes_in_use.is_some() {
            let memory = Gauge::new(
                "Memory in Use",
                "Of rank 0's device, after a step",
                f64::NAN,
                read(|step| {
                    let bytes = step.bytes_in_use;
                    bytes.map_or(f64::NAN, |bytes| bytes as f64 / f64::from(1 << 20))
                }),
            );
            gauges.push(memory.unit("MiB").format(tenths));
        }
        gauges
    }
}

/// Measures the steps of a stretch without validation.
pub(super) struct StepClock {
    /// On rank 0.
    pace: Option<Pace>,
    last_step: Instant,
    waiting: Duration,
    items: usize,
}

impl StepClock {
    /// Starts before the first batch; `items` of the epoch are done.
    pub(super) fn start(pace: Option<Pace>, items: usize) -> Self {
        Self {
            pace,
            last_step: Instant::now(),
            waiting: Duration::ZERO,
            items,
        }
    }

    /// Loads a batch.
    pub(super) fn wait<T>(&mut self, load: impl FnOnce() -> T) -> T {
        let before = Instant::now();
        let batch = load();
        self.waiting += before.elapsed();
        batch
    }

    /// A step has ended, after which so many items of the epoch are done.
    pub(super) fn step(&mut self, items: usize) {
        let now = Instant::now();
        let waiting = core::mem::take(&mut self.waiting);
        if let Some(pace) = &self.pace {
            let step = LastStep {
                whole: now - self.last_step,
                waiting,
                items: items.saturating_sub(self.items),
                bytes_in_use: pace.bytes_in_use.as_ref().map(|read| read()),
            };
            *pace.last.lock() = Some(step);
        }
        (self.last_step, self.items) = (now, items);
    }
}

/// The usual metrics of a training: see [`UpdateStrategy::metrics`](crate::UpdateStrategy::metrics).
#[derive(Debug)]
pub struct TrainingMetrics {
    pub(super) gauges: Vec<Gauge>,
}

/// For `SupervisedTraining::metrics`. They are metrics of training; validation has none of them.
impl<LC: LearningComponentsTypes> MetricRegistration<LC> for TrainingMetrics {
    fn register(self, training: SupervisedTraining<LC>) -> SupervisedTraining<LC> {
        let gauges = self.gauges.into_iter();
        gauges.fold(training, |training, gauge| {
            training.metric_train_numeric(gauge)
        })
    }
}
