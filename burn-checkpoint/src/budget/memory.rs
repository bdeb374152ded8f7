//! Counters of one thread's managed tensors on one device, with the budget that they are under.

use std::sync::Arc;

use burn_backend::DeviceId;

use crate::budget::{Budget, MemoryBudget};
use crate::host::prefetch::Prefetch;
use crate::observe::stats::Counts;

/// Counters of one thread's managed tensors on one device. A tensor keeps the counters of the
/// thread that made it.
pub(crate) struct MemoryStats {
    pub device: DeviceId,
    pub counts: Arc<Counts>,
    budget: Option<Arc<Budget>>,
    pub prefetch: Prefetch,
}

impl MemoryStats {
    pub fn new(device: DeviceId, thread: &Arc<Counts>, budget: Option<MemoryBudget>) -> Arc<Self> {
        let counts = Counts::part_of(thread);
        let budget = budget.map(|settings| Arc::new(Budget::new(settings, counts.clone())));
        Arc::new(Self {
            device,
            counts,
            budget,
            prefetch: Prefetch::default(),
        })
    }

    #[inline]
    pub fn budget(&self) -> Option<&Arc<Budget>> {
        self.budget.as_ref()
    }

    /// Whether a tensor that came back may be evicted again; also while the limit is measured.
    #[inline]
    pub fn may_evict(&self) -> bool {
        self.budget()
            .is_some_and(|budget| budget.settings.has_limit())
    }

    /// Whether an operation for which the device has no memory runs again.
    #[inline]
    pub fn retries(&self) -> bool {
        self.budget().is_some_and(|budget| budget.settings.retries)
    }

    /// Makes room for the result of an operation, if there is a limit.
    pub fn make_room(&self, op: &'static str, bytes: u64) {
        if let Some(budget) = self.budget() {
            budget.make_room(op, bytes);
        }
    }
}
