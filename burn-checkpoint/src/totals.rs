//! Sums of counters: of a thread, and of the process, over what ended too.
//!
//! ```text
//! process = what ended threads counted + threads
//! thread  = what ended ledgers counted + what was reset (process only) + ledgers
//! ```

use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::ledger::Ledger;
use crate::stats::RematStats;

/// The counters of all threads that are alive, or of which a tensor is.
static THREADS: Mutex<Vec<Weak<Totals>>> = Mutex::new(Vec::new());

/// What threads that ended counted.
static ENDED: Mutex<RematStats> = Mutex::new(RematStats::ZERO);

/// What the managed tensors of one thread add up to.
#[derive(Default)]
pub(crate) struct Totals {
    ledgers: Mutex<Vec<Weak<Ledger>>>,
    /// Of ledgers that are gone.
    past: Mutex<RematStats>,
    /// What counters held when they were set to 0: no longer the thread's, but the process's.
    reset: Mutex<RematStats>,
}

impl Totals {
    /// Those of a new thread.
    pub fn new() -> Arc<Self> {
        let totals = Arc::new(Self::default());
        let mut threads = THREADS.lock();
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&totals));
        totals
    }

    /// Adds the counters of one more device, or of one more budget.
    pub fn add(&self, ledger: &Arc<Ledger>) {
        let mut ledgers = self.ledgers.lock();
        ledgers.retain(|ledger| ledger.strong_count() > 0);
        ledgers.push(Arc::downgrade(ledger));
    }

    /// Keeps what a ledger counted that is going.
    pub fn ends(&self, stats: RematStats) {
        let mut past = self.past.lock();
        *past = past.then(stats);
    }

    pub fn ledgers(&self) -> Vec<Arc<Ledger>> {
        let ledgers = self.ledgers.lock();
        ledgers.iter().filter_map(Weak::upgrade).collect()
    }

    /// Since the last reset. Devices have their peaks at the same time, if it has to be, budgets one after the other.
    pub fn stats(&self) -> RematStats {
        let ledgers = self.ledgers();
        let (current, before): (Vec<_>, Vec<_>) =
            ledgers.iter().partition(|ledger| ledger.is_current());
        let sum = current
            .iter()
            .fold(RematStats::ZERO, |sum, ledger| sum + ledger.stats());
        let past = *self.past.lock();
        let before = before.iter().map(|ledger| ledger.stats());
        before.fold(sum.then(past), RematStats::then)
    }

    /// Counters to 0, peaks to what is live.
    pub fn reset(&self) {
        // Held all the time: for the process what is counted here never is nowhere.
        let mut reset = self.reset.lock();
        *reset = *reset + self.stats().without_bytes_held();
        self.ledgers().iter().for_each(|ledger| ledger.reset());
        *self.past.lock() = RematStats::ZERO;
    }
}

impl Drop for Totals {
    fn drop(&mut self) {
        let mut ended = ENDED.lock();
        let own = *self.past.get_mut() + *self.reset.get_mut();
        *ended = ended.then(own);
    }
}

/// The sum over all threads, since the process began.
pub(crate) fn of_process() -> RematStats {
    let ended = ENDED.lock();
    let threads: Vec<_> = THREADS.lock().iter().filter_map(Weak::upgrade).collect();
    let sum = threads.iter().fold(RematStats::ZERO, |sum, thread| {
        let reset = thread.reset.lock();
        sum + thread.stats() + *reset
    });
    let sum = sum.then(*ended);
    // The last reference to a thread's counters may be among these, which then end.
    drop(ended);
    drop(threads);
    sum
}
