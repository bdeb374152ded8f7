//! Counters of one thread on one device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use burn_backend::DeviceId;

use crate::budget::Budget;
use crate::host::Line;
use crate::stats::RematStats;
use crate::totals::Totals;

/// What the managed tensors of one thread on one device add up to. Tensors keep the ledger of the thread that made them,
/// wherever they are used.
pub(crate) struct Ledger {
    device: DeviceId,
    live: AtomicU64,
    peak: AtomicU64,
    evicted: Counter,
    replayed: Counter,
    offloaded_bytes: AtomicU64,
    uploaded_bytes: AtomicU64,
    replay_nanos: AtomicU64,
    budget: Option<Arc<Budget>>,
    /// Whether new tensors are counted here: not after the thread's budget was changed for another one.
    current: AtomicBool,
    thread: Arc<Totals>,
    /// Copies in host memory.
    line: Line,
}

/// Bytes and how many operations they belong to.
#[derive(Default)]
struct Counter {
    bytes: AtomicU64,
    operations: AtomicU64,
}

impl Counter {
    fn count(&self, bytes: u64) {
        self.add(bytes, 1);
    }

    fn add(&self, bytes: u64, operations: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.operations.fetch_add(operations, Ordering::Relaxed);
    }

    fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    fn reset(&self) {
        self.bytes.store(0, Ordering::Relaxed);
        self.operations.store(0, Ordering::Relaxed);
    }
}

impl Ledger {
    pub fn new(device: DeviceId, budget: Option<Arc<Budget>>, thread: Arc<Totals>) -> Self {
        Self {
            device,
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            evicted: Counter::default(),
            replayed: Counter::default(),
            offloaded_bytes: AtomicU64::new(0),
            uploaded_bytes: AtomicU64::new(0),
            replay_nanos: AtomicU64::new(0),
            budget,
            current: AtomicBool::new(true),
            thread,
            line: Line::default(),
        }
    }

    #[inline]
    pub fn line(&self) -> &Line {
        &self.line
    }

    #[inline]
    pub fn device(&self) -> DeviceId {
        self.device
    }

    #[inline]
    pub fn budget(&self) -> Option<&Arc<Budget>> {
        self.budget.as_ref()
    }

    pub fn is_current(&self) -> bool {
        self.current.load(Ordering::Relaxed)
    }

    /// Whether new tensors are counted here from now on.
    pub fn set_current(&self, current: bool) {
        self.current.store(current, Ordering::Relaxed);
    }

    /// Whether a tensor that came back may have to go once more.
    #[inline]
    pub fn may_evict(&self) -> bool {
        self.budget
            .as_ref()
            .is_some_and(|budget| budget.may_evict())
    }

    /// Whether what several recipes start from is kept without handles.
    #[inline]
    pub fn keeps_junctions(&self) -> bool {
        self.budget
            .as_ref()
            .is_some_and(|budget| budget.keeps_junctions())
    }

    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn add(&self, bytes: u64) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if live > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(live, Ordering::Relaxed);
        }
        if let Some(budget) = &self.budget {
            budget.add(bytes);
        }
    }

    #[inline]
    pub fn remove(&self, bytes: u64) {
        self.live.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.remove(bytes);
        }
    }

    /// As [`Self::add`], of what is there for a comparison only: no peak shows it.
    pub fn add_unseen(&self, bytes: u64) {
        self.live.fetch_add(bytes, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.add_unseen(bytes);
        }
    }

    pub fn evicted(&self, bytes: u64) {
        self.evicted.count(bytes);
    }

    /// Counts bytes that came back, and the operation that was run for them if one was.
    pub fn replayed(&self, bytes: u64, ran: bool, cost_ns: f32, time: Duration) {
        self.replayed.add(bytes, u64::from(ran));
        self.replay_nanos
            .fetch_add(time.as_nanos() as u64, Ordering::Relaxed);
        if let Some(budget) = &self.budget {
            budget.replayed(cost_ns);
        }
    }

    pub fn offloaded(&self, bytes: u64) {
        self.offloaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn uploaded(&self, bytes: u64) {
        self.uploaded_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn stats(&self) -> RematStats {
        let budget = self.budget.as_ref();
        RematStats {
            live_bytes: self.live(),
            peak_bytes: self.peak.load(Ordering::Relaxed),
            evicted_bytes: self.evicted.bytes(),
            evicted_operations: self.evicted.operations(),
            replayed_bytes: self.replayed.bytes(),
            replayed_operations: self.replayed.operations(),
            offloaded_bytes: self.offloaded_bytes.load(Ordering::Relaxed),
            uploaded_bytes: self.uploaded_bytes.load(Ordering::Relaxed),
            replay_time: Duration::from_nanos(self.replay_nanos.load(Ordering::Relaxed)),
            ..budget.map_or(RematStats::ZERO, |budget| budget.stats())
        }
    }

    /// Counters to 0, the peak to what is live now.
    pub fn reset(&self) {
        self.peak.store(self.live(), Ordering::Relaxed);
        self.evicted.reset();
        self.replayed.reset();
        for counter in [
            &self.offloaded_bytes,
            &self.uploaded_bytes,
            &self.replay_nanos,
        ] {
            counter.store(0, Ordering::Relaxed);
        }
        if let Some(budget) = &self.budget {
            budget.reset_stats();
        }
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.thread.ends(self.stats());
    }
}
