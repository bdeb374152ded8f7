//! Counters for users.

use std::ops::Add;
use std::time::Duration;

/// The memory that managed tensors occupy, and what it takes to evict them and bring them back.
///
/// Counted per thread and device: ranks that are threads sharing a device have separate counters. A tensor is counted where it was
/// made, even if another thread brings it back.
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
    /// Time spent in operations that were run again; only their submission on a lazy or asynchronous backend.
    pub replay_time: Duration,
    /// Time that budgets took to find what to evict.
    pub search_time: Duration,
    /// Storages that budgets examined in these searches, some more than once.
    pub searched_tensors: u64,
    /// Steps in which replays and searches under a budget took more time than the step's own work.
    pub thrashing_steps: u64,
}

impl RematStats {
    /// The sum with later counters; of the two peaks the larger one counts.
    pub(crate) fn then(self, later: Self) -> Self {
        Self {
            peak_bytes: self.peak_bytes.max(later.peak_bytes),
            ..self + later
        }
    }

    /// The counters without live and peak bytes.
    pub(crate) fn without_bytes_held(self) -> Self {
        Self {
            live_bytes: 0,
            peak_bytes: 0,
            ..self
        }
    }
}

impl Add for RematStats {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            live_bytes: self.live_bytes + other.live_bytes,
            peak_bytes: self.peak_bytes + other.peak_bytes,
            evicted_bytes: self.evicted_bytes + other.evicted_bytes,
            evicted_operations: self.evicted_operations + other.evicted_operations,
            replayed_bytes: self.replayed_bytes + other.replayed_bytes,
            replayed_operations: self.replayed_operations + other.replayed_operations,
            offloaded_bytes: self.offloaded_bytes + other.offloaded_bytes,
            uploaded_bytes: self.uploaded_bytes + other.uploaded_bytes,
            replay_time: self.replay_time + other.replay_time,
            search_time: self.search_time + other.search_time,
            searched_tensors: self.searched_tensors + other.searched_tensors,
            thrashing_steps: self.thrashing_steps + other.thrashing_steps,
        }
    }
}
