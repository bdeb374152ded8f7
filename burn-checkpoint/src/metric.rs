//! What the Learner shows.

use std::sync::Arc;

use burn::train::metric::{
    Metric, MetricAttributes, MetricMetadata, MetricName, Numeric, NumericAttributes, NumericEntry,
    SerializedEntry,
};

use crate::RematStats;

/// A number of [`RematStats::of_process`] after each batch: for
/// `training.metric_train_numeric(RematMetric::peak_bytes())`. What was counted before the metric was made is left out, so make it
/// when the training begins.
///
/// The Learner computes metrics on a thread of its own, so a value may be that of a step later. An epoch's value is the
/// last one, not a mean.
#[derive(Clone, Debug)]
pub struct RematMetric {
    quantity: Quantity,
    name: MetricName,
    /// What the process had counted when this was made.
    start: RematStats,
    value: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Quantity {
    PeakBytes,
    LiveBytes,
    EvictedBytes,
    ReplayedOperations,
    ReplayTime,
}

impl RematMetric {
    /// The most bytes that managed tensors occupied since the last [`RematStats::reset_thread`], in MiB.
    pub fn peak_bytes() -> Self {
        Self::new(Quantity::PeakBytes, "Activation Peak")
    }

    /// Bytes that managed tensors occupy, in MiB.
    pub fn live_bytes() -> Self {
        Self::new(Quantity::LiveBytes, "Activations")
    }

    /// Bytes that were evicted since this was made, in MiB.
    pub fn evicted_bytes() -> Self {
        Self::new(Quantity::EvictedBytes, "Evicted")
    }

    /// Operations that were run again since this was made.
    pub fn replayed_operations() -> Self {
        Self::new(Quantity::ReplayedOperations, "Replayed Operations")
    }

    /// Seconds spent in replays since this was made.
    pub fn replay_time() -> Self {
        Self::new(Quantity::ReplayTime, "Replay Time")
    }

    fn new(quantity: Quantity, name: &str) -> Self {
        Self {
            quantity,
            name: Arc::new(name.to_owned()),
            start: RematStats::of_process(),
            value: 0.0,
        }
    }

    fn unit(&self) -> Option<&'static str> {
        match self.quantity {
            Quantity::PeakBytes | Quantity::LiveBytes | Quantity::EvictedBytes => Some("MiB"),
            Quantity::ReplayedOperations => None,
            Quantity::ReplayTime => Some("s"),
        }
    }

    /// Other threads count meanwhile, and what a thread counted may be on its way from one sum to another: such a difference is 0.
    fn read(&self) -> f64 {
        let (stats, start) = (RematStats::of_process(), self.start);
        let mebibytes = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        match self.quantity {
            Quantity::PeakBytes => mebibytes(stats.peak_bytes),
            Quantity::LiveBytes => mebibytes(stats.live_bytes),
            Quantity::EvictedBytes => {
                mebibytes(stats.evicted_bytes.saturating_sub(start.evicted_bytes))
            }
            Quantity::ReplayedOperations => {
                let operations = stats.replayed_operations;
                operations.saturating_sub(start.replayed_operations) as f64
            }
            Quantity::ReplayTime => {
                let time = stats.replay_time.saturating_sub(start.replay_time);
                time.as_secs_f64()
            }
        }
    }
}

impl Metric for RematMetric {
    type Input = ();

    fn name(&self) -> MetricName {
        self.name.clone()
    }

    fn attributes(&self) -> MetricAttributes {
        NumericAttributes {
            unit: self.unit().map(str::to_owned),
            higher_is_better: false,
        }
        .into()
    }

    fn update(&mut self, _item: &(), _metadata: &MetricMetadata) -> SerializedEntry {
        self.value = self.read();
        let formatted = match self.unit() {
            Some(unit) => format!("{:.1} {unit}", self.value),
            None => format!("{:.0}", self.value),
        };
        SerializedEntry::new(formatted, self.value().serialize())
    }

    /// Nothing is accumulated over an epoch.
    fn clear(&mut self) {}
}

impl Numeric for RematMetric {
    fn value(&self) -> NumericEntry {
        NumericEntry::Value(self.value)
    }

    fn running_value(&self) -> NumericEntry {
        self.value()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use burn::backend::Autodiff;
    use burn::tensor::Tensor;
    use burn_flex::Flex;

    use super::*;
    use crate::{MemoryBudget, Remat, checkpoint};

    fn replay() {
        let x = Tensor::<Autodiff<Remat<Flex>>, 1>::ones([4], &Default::default());
        let x = x.require_grad();
        let y = checkpoint(|| x.clone().exp().exp());
        y.sum().backward();
    }

    #[test]
    fn another_thread_sees_the_replays() {
        replay();
        let metric = RematMetric::replayed_operations();
        replay();
        let here = RematStats::of_thread().replayed_operations;
        let read = move || metric.read();
        let there = std::thread::spawn(read).join().expect("no panic");
        // Other tests replay, too.
        assert!(there >= (here / 2) as f64 && here > 0, "{there}");
    }

    /// What another thread sets to 0 is counted elsewhere by then, and what ends is not less than nothing.
    #[test]
    fn a_difference_is_never_below_zero() {
        let over = AtomicBool::new(false);
        std::thread::scope(|threads| {
            threads.spawn(|| {
                while !over.load(Ordering::Relaxed) {
                    let budget = MemoryBudget::bytes(1 << 20).install();
                    replay();
                    RematStats::reset_thread();
                    replay();
                    drop(budget);
                }
            });
            for _ in 0..20_000 {
                let operations = RematMetric::replayed_operations().read();
                let seconds = RematMetric::replay_time().read();
                let mebibytes = RematMetric::evicted_bytes().read();
                // Of the op_context between two looks, in this and in other tests.
                assert!(operations < 1e6 && seconds < 1e3 && mebibytes < 1e3);
            }
            over.store(true, Ordering::Relaxed);
        });
    }

    /// Nor is anything lost when counters are reset.
    #[test]
    fn what_ended_is_counted_on() {
        let metric = RematMetric::replayed_operations();
        let mut expected = 0;
        for _ in 0..3 {
            let thread = std::thread::spawn(|| {
                let count = || RematStats::of_thread().replayed_operations;
                let budget = MemoryBudget::bytes(1 << 20).install();
                replay();
                let first = count();
                drop(budget);
                assert!(first > 0 && count() == first, "a budget that ended");
                replay();
                let all = count();
                assert!(all > first);
                RematStats::reset_thread();
                assert_eq!(count(), 0);
                replay();
                all + count()
            });
            expected += thread.join().expect("no panic");
        }
        assert!(metric.read() >= expected as f64);
    }
}
