//! Counters of managed tensors as metrics of the Learner.

use std::sync::Arc;

use burn_decorator::gauge::Gauge;
use burn_decorator::gauge_metric;
use parking_lot::Mutex;

use crate::RematStats;
use crate::budget::install::record_operations;
use crate::error::size;
use crate::observe::snapshot::InUse;
use crate::observe::trace;

/// A number of [`RematStats::of_process`] after each batch: for
/// `training.metric_train_numeric(RematMetric::peak_bytes())`. What was evicted and replayed before
/// the metric was made is left out, so make it when the training begins; the peak is that since the
/// last [`RematStats::reset_thread`].
///
/// The Learner computes metrics on a thread of its own, so a value may be that of a step later. An
/// epoch's value is the last one, not a mean.
#[derive(Clone, Debug)]
pub struct RematMetric(Gauge);

gauge_metric!(RematMetric);

impl RematMetric {
    /// The most bytes that managed tensors occupied since the last [`RematStats::reset_thread`], in
    /// MiB.
    pub fn peak_bytes() -> Self {
        let about = "The most bytes that managed tensors occupied";
        let read = || mebibytes(RematStats::of_process().peak_bytes);
        in_unit("MiB", Gauge::new("Activation Peak", about, 0.0, read))
    }

    /// Bytes that were evicted since this was made, in MiB.
    pub fn evicted_bytes() -> Self {
        let about = "Bytes that evictions freed";
        let read = |stats: RematStats| mebibytes(stats.evicted_bytes);
        in_unit("MiB", since_now("Evicted", about, read))
    }

    /// Operations that were run again since this was made.
    pub fn replayed_operations() -> Self {
        let about = "Operations that were run again";
        let read = |stats: RematStats| stats.replayed_operations as f64;
        let gauge = since_now("Replayed Operations", about, read);
        Self(gauge.format(|operations| format!("{operations:.0}")))
    }

    /// Seconds spent in replays since this was made.
    pub fn replay_time() -> Self {
        let about = "Time spent in replays";
        let read = |stats: RematStats| stats.replay_time.as_secs_f64();
        in_unit("s", since_now("Replay Time", about, read))
    }
}

fn mebibytes(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn in_unit(unit: &'static str, gauge: Gauge) -> RematMetric {
    let text = move |value| format!("{value:.1} {unit}");
    RematMetric(gauge.unit(unit).format(text))
}

/// What a counter of the process grows by from now on.
fn since_now(name: &str, about: &'static str, read: fn(RematStats) -> f64) -> Gauge {
    let start = read(RematStats::of_process());
    let growth = move || read(RematStats::of_process()) - start;
    Gauge::new(name, about, 0.0, growth)
}

/// The most bytes in use since the last read, in MiB, and the three largest
/// [holders](crate::observe::snapshot::Holder) at that time: for
/// `training.metric_train_numeric(HoldersMetric::new())`.
///
/// It counts every tensor of the thread that makes the metric. Where no
/// [`MemoryBudget`](crate::MemoryBudget) is in force,
/// [`MemoryBudget::unlimited`](crate::MemoryBudget::unlimited) is, on every thread, until all clones
/// of the metric are dropped. The Learner computes metrics on a thread of its own, so a read may
/// come while the next step runs: then the next value is of what is left of that step.
///
/// # Cost
///
/// Those of [`record`](crate::observe::trace::record) and of
/// [`MemoryBudget::install`](crate::MemoryBudget::install), until all clones are dropped.
#[derive(Clone, Debug)]
pub struct HoldersMetric(Gauge);

gauge_metric!(HoldersMetric);

/// What a [`HoldersMetric`] shows.
#[derive(Default)]
struct Shown {
    in_use: InUse,
    peak_mib: f64,
    /// The peak and the largest holders.
    text: String,
}

impl HoldersMetric {
    /// Follows the tensors of this thread, which is to be the one that trains.
    #[allow(clippy::new_without_default, reason = "it begins a recording")]
    pub fn new() -> Self {
        let unlimited = record_operations();
        let recording = trace::record();
        let last = Arc::new(Mutex::new(Shown::default()));
        let shown = last.clone();
        // Without tensors since the last read, the value is the last one.
        let read = move || {
            let _ends_with_the_metric = &unlimited;
            let mut last = last.lock();
            last.text = "no tensors".to_owned();
            if let Some(peak) = last.in_use.follow(&recording.take()) {
                last.peak_mib = mebibytes(peak.live_bytes);
                let largest = peak.holders.iter().take(3);
                let named: Vec<_> = largest
                    .map(|held| format!("{} {}", held.owner, size(held.bytes)))
                    .collect();
                last.text = format!("{}: {}", size(peak.live_bytes), named.join(", "));
            }
            last.peak_mib
        };
        let about = "The most bytes in use, and what held most of them";
        let gauge = Gauge::new("Largest Holders", about, 0.0, read).unit("MiB");
        Self(gauge.format(move |_| shown.lock().text.clone()))
    }
}
