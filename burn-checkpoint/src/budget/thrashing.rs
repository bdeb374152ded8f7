//! Noticing that a step replays more than it computes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::size;

/// What the steps of a device under a budget took. A step is judged as soon as it is over: when the next forward pass begins, when
/// a loop says so, or when the budget ends.
#[derive(Default)]
pub(super) struct Thrashing {
    work: Mutex<Work>,
    steps: AtomicU64,
    said: AtomicBool,
}

/// Work of a step under way, in estimated nanoseconds.
#[derive(Clone, Copy, Default)]
struct Work {
    computed_ns: f64,
    replayed_ns: f64,
}

impl Thrashing {
    /// Counts work.
    pub fn computed(&self, cost_ns: f32) {
        self.work.lock().computed_ns += f64::from(cost_ns);
    }

    /// Counts work that was done once more.
    pub fn replayed(&self, cost_ns: f32) {
        self.work.lock().replayed_ns += f64::from(cost_ns);
    }

    /// How many steps replayed more than they computed, since the last reset.
    pub fn steps(&self) -> u64 {
        self.steps.load(Ordering::Relaxed)
    }

    /// Counts from 0 again.
    pub fn reset(&self) {
        self.steps.store(0, Ordering::Relaxed);
    }

    /// A step is over: its work is compared with what was replayed for it.
    pub fn judge(&self, limit: Option<u64>) {
        let work = std::mem::take(&mut *self.work.lock());
        if work.replayed_ns <= work.computed_ns {
            return;
        }
        self.steps.fetch_add(1, Ordering::Relaxed);
        if !self.said.swap(true, Ordering::Relaxed) {
            log::warn!(
                "the memory budget of {} makes a step replay {:.1} times the work that it has: tensors are evicted and brought \
                 back over and over; a larger budget will be much faster",
                size(limit.unwrap_or(0)),
                work.replayed_ns / work.computed_ns.max(1.0)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Steps of so much work, each judged.
    fn judged(steps: &[(f32, f32)]) -> Thrashing {
        let thrashing = Thrashing::default();
        for (computed, replayed) in steps {
            thrashing.computed(*computed);
            thrashing.replayed(*replayed);
            thrashing.judge(Some(1));
        }
        thrashing
    }

    #[test]
    fn a_step_that_replays_more_than_it_computes() {
        assert_eq!(judged(&[(100.0, 101.0)]).steps(), 1);
        assert_eq!(judged(&[(100.0, 100.0)]).steps(), 0);
        // Each by itself: neither the sum of all nor what is left of the one before.
        let steps = [
            (100.0, 150.0),
            (100.0, 20.0),
            (100.0, 300.0),
            (500.0, 400.0),
        ];
        assert_eq!(judged(&steps).steps(), 2);
    }

    #[test]
    fn a_step_without_work_does_not_thrash() {
        assert_eq!(judged(&[(0.0, 0.0), (0.0, 0.0)]).steps(), 0);
    }

    #[test]
    fn counted_from_0_after_a_reset() {
        let thrashing = judged(&[(1.0, 2.0)]);
        thrashing.reset();
        assert_eq!(thrashing.steps(), 0);
        thrashing.replayed(1.0);
        thrashing.judge(None);
        assert_eq!(thrashing.steps(), 1);
    }
}
