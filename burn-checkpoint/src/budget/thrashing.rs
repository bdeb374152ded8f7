//! Noticing that a step spends more on its budget than it computes.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

use crate::error::size;

/// Estimated nanoseconds to look at one tensor in a search.
const LOOK_NS: f64 = 100.0;

/// The log warns of a step, before it is over, once it has wasted so many times what it has
/// computed.
const CERTAIN: f64 = 2.0;

/// The limit is raised once a step has wasted so many times what it has computed, as it would not
/// end in reasonable time,
const ENDLESS: f64 = 32.0;

/// and more than so many nanoseconds.
const ENDLESS_NS: f64 = 1e8;

/// Work and waste of a step. It is judged when it is over: when the next forward pass begins, the
/// training loop says so, or the budget ends.
#[derive(Default)]
pub(crate) struct Thrashing {
    /// Estimated nanoseconds of the operations of the step under way. Only the thread whose budget
    /// it is adds to them.
    computed_ns: AtomicU64,
    waste: Mutex<Waste>,
    said: AtomicBool,
}

/// What a step under way does for its budget alone, in estimated nanoseconds.
#[derive(Clone, Copy, Default)]
struct Waste {
    /// Replays, and searches for something to evict.
    ns: f64,
    /// At which the limit was raised last.
    raised_at_ns: f64,
}

impl Thrashing {
    #[inline]
    pub fn computed(&self, cost_ns: f32) {
        let computed_ns = self.computed_ns.load(Ordering::Relaxed);
        self.computed_ns
            .store(computed_ns + cost_ns as u64, Ordering::Relaxed);
    }

    fn computed_ns(&self) -> f64 {
        self.computed_ns.load(Ordering::Relaxed) as f64
    }

    pub fn replayed(&self, cost_ns: f32) {
        self.waste.lock().ns += f64::from(cost_ns);
    }

    /// Counts a search, and warns if the step spends far more on replays and searches than on its
    /// work.
    pub fn searched(&self, tensors: u64, limit: u64) {
        let mut waste = self.waste.lock();
        waste.ns += LOOK_NS * tensors as f64;
        if waste.ns > CERTAIN * self.computed_ns() {
            self.say(waste.ns, limit);
        }
    }

    /// Whether the step has wasted so much, since this last returned true, that it would hardly
    /// end.
    pub fn is_endless(&self) -> bool {
        let mut waste = self.waste.lock();
        let endless = waste.ns - waste.raised_at_ns > ENDLESS_NS.max(ENDLESS * self.computed_ns());
        if endless {
            waste.raised_at_ns = waste.ns;
        }
        endless
    }

    /// A step is over: returns whether it has wasted more than it has computed; not without a
    /// limit, where only scopes replay.
    pub fn judge(&self, limit: Option<u64>) -> bool {
        let waste_ns = std::mem::take(&mut *self.waste.lock()).ns;
        let exceeded = limit.filter(|_| waste_ns > self.computed_ns());
        if let Some(limit) = exceeded {
            self.say(waste_ns, limit);
        }
        self.computed_ns.store(0, Ordering::Relaxed);
        exceeded.is_some()
    }

    fn say(&self, waste_ns: f64, limit: u64) {
        if !self.said.swap(true, Ordering::Relaxed) {
            burn_decorator::warn_user!(
                "the memory budget of {} makes a step replay {:.1} times the work that it has, searches included: tensors are \
                 evicted and brought back over and over; a larger budget will be much faster",
                size(limit),
                waste_ns / self.computed_ns().max(1.0)
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_wastes_more_than_it_computes() {
        let thrashing = Thrashing::default();
        // Each by itself: neither the sum of all nor what is left of the one before.
        for (computed, replayed, searched, thrashes) in [
            (100.0, 101.0, 0, true),
            (100.0, 100.0, 0, false),
            (0.0, 0.0, 0, false),
            (100.0, 20.0, 0, false),
            (100.0, 300.0, 0, true),
            (500.0, 400.0, 0, false),
            (1000.0, 0.0, 11, true),
        ] {
            thrashing.computed(computed);
            thrashing.replayed(replayed);
            thrashing.searched(searched, 1);
            assert_eq!(thrashing.judge(Some(1)), thrashes, "{computed} {replayed}");
            thrashing.replayed(1.0);
            assert!(!thrashing.judge(None));
        }
    }

    #[test]
    fn endless_again_only_after_as_much_once_more() {
        let thrashing = Thrashing::default();
        for (computed, endless) in [(0.0, 1e8), (1e7, 3.2e8)] {
            thrashing.computed(computed);
            for _ in 0..2 {
                thrashing.replayed(endless);
                assert!(!thrashing.is_endless());
                thrashing.replayed(64.0);
                assert!(thrashing.is_endless());
            }
        }
    }
}
