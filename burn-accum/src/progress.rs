//! The progress of an accumulation: a handle and a metric.

use std::sync::Arc;

use burn_decorator::gauge::Gauge;
use burn_decorator::gauge_metric;
use burn_decorator::non_finite::Outcome;
use burn_decorator::ranks::{ForRank, Shared};
use burn_update::CountsUpdates;
use parking_lot::{Mutex, MutexGuard};

use crate::tally::{Step, Tally};

/// How far an [`Accumulation`](crate::Accumulation) is: a handle that stays valid when the update
/// moves into a `Learner`. Clones, of the handle and of the update, share it.
///
/// Updates are known to the host. What is in the open window is read from the device when it is
/// complete: the other accessors wait for it if they are asked before.
#[derive(Clone, Debug, Default)]
pub struct UpdateCounter {
    seen: Shared<Counts>,
}

#[derive(Debug, Default)]
struct Counts(Mutex<Seen>);

impl ForRank for Counts {
    fn for_rank(&self) -> Self {
        Self(Mutex::new(self.0.lock().clone()))
    }
}

#[derive(Clone, Debug, Default)]
struct Seen {
    tally: Tally,
    /// The micro-steps that are not in the tally, because the host does not know their outcome yet.
    unread: Vec<(Step, Arc<dyn Outcome>)>,
    last_dropped: Option<Dropped>,
}

/// A micro-batch that was dropped from its window because of non-finite gradients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dropped {
    /// Number of the micro-batch, counted from 1 since the training began.
    pub micro_batch: u64,
    /// Updates taken before.
    pub updates: u64,
    /// Paths of all parameters with a non-finite gradient, such as
    /// `blocks.3.attention.query.weight`: in module order, or in the order of their names where
    /// several ranks decide together.
    pub parameters: Vec<String>,
}

impl UpdateCounter {
    /// Steps of the optimizer so far (optax's `gradient_step`).
    pub fn updates(&self) -> u64 {
        self.seen.0.lock().tally.updates
    }

    /// Windows that were no update, because all of their micro-batches were dropped or their sum
    /// overflowed, also in a reduction over ranks under a loss scaler.
    pub fn skipped_updates(&self) -> u64 {
        self.seen.0.lock().tally.skipped_updates
    }

    /// Micro-batches so far, dropped ones included, but not those that were dropped under a loss
    /// scaler.
    pub fn micro_batches(&self) -> u64 {
        self.settled().tally.micro_batches
    }

    /// Micro-batches that were dropped because of non-finite gradients.
    pub fn dropped(&self) -> u64 {
        self.settled().tally.dropped
    }

    /// Micro-steps in the current window so far (optax's `mini_step`); 0 right after an update.
    pub fn micro_step(&self) -> u64 {
        self.settled().tally.window.micro_steps
    }

    /// The last micro-batch that was dropped, with the parameters whose gradients were non-finite.
    pub fn last_dropped(&self) -> Option<Dropped> {
        self.settled().last_dropped.clone()
    }

    /// With the micro-steps whose outcome has not been read. Reads it.
    fn settled(&self) -> MutexGuard<'_, Seen> {
        let mut seen = self.seen.0.lock();
        for (step, outcome) in core::mem::take(&mut seen.unread) {
            let culprits = outcome.culprits();
            seen.tally.count(&step, 0.0, culprits);
            seen.name_dropped(&step, culprits);
        }
        seen
    }

    pub(crate) fn publish(&self, tally: Tally, unread: Vec<(Step, Arc<dyn Outcome>)>) {
        let mut seen = self.seen.0.lock();
        seen.tally = tally;
        seen.unread = unread;
    }

    /// Names a micro-step that is counted, if it was dropped, and returns the result.
    pub(crate) fn publish_dropped(
        &self,
        tally: Tally,
        step: &Step,
        culprits: &[String],
    ) -> Option<Dropped> {
        let mut seen = self.seen.0.lock();
        seen.tally = tally;
        seen.name_dropped(step, culprits)
    }

    /// Forgets what was dropped.
    pub(crate) fn reset_dropped(&self) {
        self.seen.0.lock().last_dropped = None;
    }
}

impl CountsUpdates for UpdateCounter {
    fn updates(&self) -> u64 {
        self.updates()
    }
}

impl Seen {
    fn name_dropped(&mut self, step: &Step, culprits: &[String]) -> Option<Dropped> {
        if culprits.is_empty() || step.scaled {
            return None;
        }
        self.last_dropped = Some(Dropped {
            micro_batch: self.tally.micro_batches,
            updates: self.tally.updates,
            parameters: culprits.to_vec(),
        });
        self.last_dropped.clone()
    }
}

/// The number of updates since the training began, for a `Learner`: Burn's own iterations are
/// micro-batches. As of when the metric is computed, which Burn does while training goes on. Never
/// waits for a device.
#[derive(Clone)]
pub struct UpdatesMetric(Gauge);

impl UpdatesMetric {
    /// The metric of `counter`: see [`Accumulation::updates`](crate::Accumulation::updates).
    pub fn new(counter: &UpdateCounter) -> Self {
        let counter = counter.clone();
        let read = move || counter.updates() as f64;
        let about = "Optimizer updates, each made of a window of micro-batches";
        Self(
            Gauge::new("Updates", about, read(), read)
                .unit("updates")
                .rising(),
        )
    }
}

gauge_metric!(UpdatesMetric);
