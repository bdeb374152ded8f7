//! Counters of managed tensors: of a thread on one device, of a thread, of the process.

use std::ops::Add;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use parking_lot::Mutex;

/// The memory that managed tensors occupy, and what it takes to evict them and bring them back.
///
/// Counted per thread and device: ranks that are threads sharing a device have separate counters. A
/// tensor is counted where it was made, even if another thread brings it back.
///
/// ```
/// use burn_checkpoint::{Remat, RematStats, checkpoint};
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
/// let x = Tensor::<B, 2>::ones([64, 64], &Default::default()).require_grad();
/// let y = checkpoint(|| x.clone().exp().exp().exp());
/// assert_eq!(RematStats::of_thread().evicted_operations, 2);
/// y.sum().backward();
/// assert_eq!(RematStats::of_thread().replayed_operations, 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RematStats {
    /// Bytes that managed tensors occupy now; views of one storage are counted once.
    pub live_bytes: u64,
    /// The most bytes that they ever occupied, since the last reset.
    pub peak_bytes: u64,
    /// Bytes that evictions freed.
    pub evicted_bytes: u64,
    /// Tensors that were evicted.
    pub evicted_operations: u64,
    /// Bytes that came back by a recipe.
    pub replayed_bytes: u64,
    /// Operations that were run again.
    pub replayed_operations: u64,
    /// Bytes that were moved to host memory.
    pub offloaded_bytes: u64,
    /// Bytes that came back from host memory.
    pub uploaded_bytes: u64,
    /// Time spent in replays, with their evictions; only the submission of operations on a lazy or
    /// asynchronous backend.
    pub replay_time: Duration,
    /// Time that budgets took to find what to evict.
    pub search_time: Duration,
    /// Storages that budgets examined in these searches, some more than once.
    pub searched_tensors: u64,
    /// Steps in which replays and searches under a budget took more time than the step's own work.
    pub thrashing_steps: u64,
}

impl Add for RematStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        macro_rules! sums {
            ($($field:ident)*) => { Self { $($field: self.$field + other.$field),* } };
        }
        sums!(live_bytes peak_bytes evicted_bytes evicted_operations replayed_bytes replayed_operations offloaded_bytes
            uploaded_bytes replay_time search_time searched_tensors thrashing_steps)
    }
}

/// Counters of one device's tensors, made by one thread under one budget; or of a thread; or of the
/// process.
#[derive(Default)]
pub(crate) struct Counts {
    live: AtomicU64,
    /// The most since the last reset.
    peak: AtomicU64,
    /// The most until the last reset.
    highest: AtomicU64,
    /// The least since it was set.
    pub lowest: AtomicU64,
    /// All else since the last reset; live and peak bytes, which every operation changes, are 0
    /// here.
    others: Mutex<RematStats>,
    /// The counters that these are a part of: a device's of the thread's, a thread's of the
    /// process's.
    whole: Option<Arc<Counts>>,
}

pub(crate) static OF_PROCESS: LazyLock<Arc<Counts>> = LazyLock::new(Arc::default);

impl Counts {
    pub fn part_of(whole: &Arc<Self>) -> Arc<Self> {
        Arc::new(Self {
            whole: Some(whole.clone()),
            ..Self::default()
        })
    }

    fn wholes(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |counts| counts.whole.as_deref())
    }

    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    pub fn highest(&self) -> u64 {
        let peak = self.peak.load(Ordering::Relaxed);
        self.highest.load(Ordering::Relaxed).max(peak)
    }

    /// Adds a storage.
    #[inline]
    pub fn add(&self, bytes: u64) {
        for counts in self.wholes() {
            let live = counts.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
            if live > counts.peak.load(Ordering::Relaxed) {
                counts.peak.fetch_max(live, Ordering::Relaxed);
            }
        }
    }

    #[inline]
    pub fn remove(&self, bytes: u64) {
        for counts in self.wholes() {
            let live = counts.live.fetch_sub(bytes, Ordering::Relaxed) - bytes;
            if live < counts.lowest.load(Ordering::Relaxed) {
                counts.lowest.fetch_min(live, Ordering::Relaxed);
            }
        }
    }

    /// Counts all but live and peak bytes.
    pub fn count(&self, count: impl Fn(&mut RematStats)) {
        for counts in self.wholes() {
            count(&mut counts.others.lock());
        }
    }

    pub fn stats(&self) -> RematStats {
        RematStats {
            live_bytes: self.live(),
            peak_bytes: self.peak.load(Ordering::Relaxed),
            ..*self.others.lock()
        }
    }

    /// Sets the counters to 0 and the peak to the live bytes.
    pub fn reset(&self) {
        self.reset_peak();
        *self.others.lock() = RematStats::default();
    }

    /// Sets the peak and the highest bytes of all time to the live bytes.
    pub fn forget_highest(&self) {
        self.highest.store(self.live(), Ordering::Relaxed);
        self.peak.store(self.live(), Ordering::Relaxed);
    }

    pub fn reset_peak(&self) {
        self.highest.store(self.highest(), Ordering::Relaxed);
        self.peak.store(self.live(), Ordering::Relaxed);
    }
}
