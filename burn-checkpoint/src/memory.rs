//! Counters of managed tensors: of a thread on one device, of a thread, of the process.
//!
//! ```text
//! process = what ended threads counted, and what was reset + threads
//! thread  = what ended counters counted + counters of each device and budget
//! ```

use std::ops::Add;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Weak};
use std::time::Duration;

use burn_backend::DeviceId;
use parking_lot::Mutex;

use crate::cost::ResultKey;
use crate::entry::AnyEntry;
use crate::prefetch::Prefetch;
use crate::snapshot::Snapshot;
use crate::stats::RematStats;
use crate::verify;

/// What is counted on one device.
#[derive(Default)]
pub(crate) struct Counts {
    live: AtomicU64,
    /// The most since the last reset.
    peak: AtomicU64,
    /// The most ever.
    highest: AtomicU64,
    /// The least since it was set.
    pub lowest: AtomicU64,
    /// All else since the last reset; live and peak bytes, which every operation changes, are 0 here.
    pub others: Mutex<RematStats>,
}

impl Counts {
    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    pub fn highest(&self) -> u64 {
        self.highest.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn add(&self, bytes: u64) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if live > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(live, Ordering::Relaxed);
            self.highest.fetch_max(live, Ordering::Relaxed);
        }
    }

    /// As [`Self::add`], for a storage that exists for a comparison only: no peak includes it.
    pub fn add_unseen(&self, bytes: u64) {
        self.live.fetch_add(bytes, Ordering::Relaxed);
    }

    #[inline]
    pub fn remove(&self, bytes: u64) {
        let live = self.live.fetch_sub(bytes, Ordering::Relaxed) - bytes;
        if live < self.lowest.load(Ordering::Relaxed) {
            self.lowest.fetch_min(live, Ordering::Relaxed);
        }
    }
}

/// A limit on the bytes of one device; a budget implements it. Counters report to it what they count.
pub(crate) trait Limit: Send + Sync {
    /// Whether a tensor that came back may be evicted again.
    fn may_evict(&self) -> bool;
    /// Whether a branch point, which several recipes start from, keeps its storage without handles.
    fn keeps_branch_points(&self) -> bool;
    /// Evicts until `bytes` more fit.
    fn make_room(&self, op: &'static str, bytes: u64);
    /// Whether an operation for which the device has no memory runs again.
    fn retries(&self) -> bool;
    /// Evicts an eighth of what is live. Returns the bytes that this frees.
    fn relieve(&self) -> u64;
    /// The live tensors, by operation.
    fn holders(&self, device: DeviceId) -> Snapshot;
    /// Adds a new node. Returns its place.
    fn register(&self, node: Weak<dyn AnyEntry>) -> u64;
    /// Removes a node that is being dropped: what refers to it would keep its allocation.
    fn forget(&self, place: u64);
    /// Adds a node that is resident again to those that may be evicted.
    fn list(&self, node: Arc<dyn AnyEntry>);
    /// Estimated nanoseconds to bring a tensor of so many bytes back from the host.
    fn upload_ns(&self, bytes: u64) -> f32;
    /// Counts an operation and its work.
    fn computed(&self, key: ResultKey, cost_ns: f32);
    /// Counts the work of a replay.
    fn replayed(&self, cost_ns: f32);
    /// Remembers the size of an operation's result.
    fn expect(&self, key: ResultKey, bytes: u64);
    /// The size that an operation's result had last time.
    fn expected(&self, key: ResultKey) -> Option<u64>;
}

/// Counters of one thread's managed tensors on one device. A tensor keeps the counters of the thread that made it.
pub(crate) struct MemoryStats {
    pub device: DeviceId,
    pub counts: Arc<Counts>,
    limit: Option<Arc<dyn Limit>>,
    /// Whether new tensors are counted here: false once another budget came into force on the thread.
    current: AtomicBool,
    thread: Arc<Totals>,
    pub prefetch: Prefetch,
}

impl MemoryStats {
    /// New counters of a thread on a device, which the thread's [`Totals::stats`] includes from now on.
    pub fn new(
        device: DeviceId,
        counts: Arc<Counts>,
        limit: Option<Arc<dyn Limit>>,
        thread: &Arc<Totals>,
    ) -> Arc<Self> {
        let memory = Arc::new(Self {
            device,
            counts,
            limit,
            current: AtomicBool::new(true),
            thread: thread.clone(),
            prefetch: Prefetch::default(),
        });
        thread.add(&memory);
        memory
    }

    #[inline]
    pub fn limit(&self) -> Option<&dyn Limit> {
        self.limit.as_deref()
    }

    /// Whether new tensors are counted here from now on.
    pub fn set_current(&self, current: bool) {
        self.current.store(current, Ordering::Relaxed);
    }

    /// Whether a tensor that came back may be evicted again.
    #[inline]
    pub fn may_evict(&self) -> bool {
        self.limit().is_some_and(Limit::may_evict)
    }

    /// Whether an operation for which the device has no memory runs again.
    #[inline]
    pub fn retries(&self) -> bool {
        self.limit().is_some_and(Limit::retries)
    }

    /// Makes room for the result of an operation, if there is a limit; not for a replay that only compares.
    pub fn make_room(&self, op: &'static str, bytes: u64) {
        if let Some(limit) = self.limit()
            && !verify::is_rehearsing()
        {
            limit.make_room(op, bytes);
        }
    }

    pub fn evicted(&self, bytes: u64) {
        let mut counted = self.counts.others.lock();
        counted.evicted_bytes += bytes;
        counted.evicted_operations += 1;
    }

    /// Counts bytes that came back, and the operation that was run for them if one was.
    pub fn replayed(&self, bytes: u64, ran: bool, cost_ns: f32, time: Duration) {
        let mut counted = self.counts.others.lock();
        counted.replayed_bytes += bytes;
        counted.replayed_operations += u64::from(ran);
        counted.replay_time += time;
        drop(counted);
        if let Some(limit) = self.limit() {
            limit.replayed(cost_ns);
        }
    }

    pub fn offloaded(&self, bytes: u64) {
        self.counts.others.lock().offloaded_bytes += bytes;
    }

    pub fn uploaded(&self, bytes: u64) {
        self.counts.others.lock().uploaded_bytes += bytes;
    }

    pub fn stats(&self) -> RematStats {
        RematStats {
            live_bytes: self.counts.live(),
            peak_bytes: self.counts.peak.load(Ordering::Relaxed),
            ..*self.counts.others.lock()
        }
    }

    /// Sets the counters to 0 and the peak to the live bytes.
    fn reset(&self) {
        let live = self.counts.live();
        self.counts.peak.store(live, Ordering::Relaxed);
        *self.counts.others.lock() = RematStats::default();
    }
}

impl Drop for MemoryStats {
    fn drop(&mut self) {
        let mut past = self.thread.past.lock();
        *past = past.then(self.stats());
    }
}

/// The sums of all threads that are alive or have live tensors.
static THREADS: Mutex<Vec<Weak<Totals>>> = Mutex::new(Vec::new());

/// The sum of what threads counted that ended, and of what was reset to 0.
static PAST: LazyLock<Mutex<RematStats>> = LazyLock::new(Mutex::default);

/// The sum over the managed tensors of one thread.
#[derive(Default)]
pub(crate) struct Totals {
    counters: Mutex<Vec<Weak<MemoryStats>>>,
    /// The sum over counters that were dropped.
    past: Mutex<RematStats>,
}

impl Totals {
    /// The sums of a new thread.
    pub fn new() -> Arc<Self> {
        let totals = Arc::new(Self::default());
        let mut threads = THREADS.lock();
        threads.retain(|thread| thread.strong_count() > 0);
        threads.push(Arc::downgrade(&totals));
        totals
    }

    /// Adds the counters of one more device, or of one more budget.
    fn add(&self, memory: &Arc<MemoryStats>) {
        let mut counters = self.counters.lock();
        counters.retain(|memory| memory.strong_count() > 0);
        counters.push(Arc::downgrade(memory));
    }

    fn counters(&self) -> Vec<Arc<MemoryStats>> {
        let counters = self.counters.lock();
        counters.iter().filter_map(Weak::upgrade).collect()
    }

    /// The sum since the last reset. Peaks of devices under one budget are added up; of successive budgets the largest counts.
    pub fn stats(&self) -> RematStats {
        let counters = self.counters();
        let (current, before): (Vec<_>, Vec<_>) = counters
            .iter()
            .partition(|memory| memory.current.load(Ordering::Relaxed));
        let sum = current
            .iter()
            .fold(RematStats::default(), |sum, memory| sum + memory.stats());
        let past = *self.past.lock();
        let before = before.iter().map(|memory| memory.stats());
        before.fold(sum.then(past), RematStats::then)
    }

    /// Sets the counters to 0 and the peaks to the live bytes.
    pub fn reset(&self) {
        // Locked until the end, so that the process's sum misses nothing that is counted here.
        let mut past = PAST.lock();
        *past = *past + self.stats().without_bytes_held();
        self.counters().iter().for_each(|memory| memory.reset());
        *self.past.lock() = RematStats::default();
    }
}

impl Drop for Totals {
    fn drop(&mut self) {
        let mut past = PAST.lock();
        *past = past.then(*self.past.get_mut());
    }
}

/// The sum over all threads, since the process began.
pub(crate) fn of_process() -> RematStats {
    let past = PAST.lock();
    let threads: Vec<_> = THREADS.lock().iter().filter_map(Weak::upgrade).collect();
    let sums = threads.iter().map(|thread| thread.stats());
    let sum = sums.fold(RematStats::default(), Add::add).then(*past);
    // `past` is unlocked first: dropping the last reference to a thread's sums locks it.
    drop(past);
    drop(threads);
    sum
}
