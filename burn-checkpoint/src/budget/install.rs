//! Putting a memory budget into force, on a thread or on all.

use std::sync::Arc;

use crate::budget::MemoryBudget;
use crate::budget::memory::Installed;
use crate::record::context::{self, InForce};
use crate::record::step::Phase;

impl MemoryBudget {
    /// Puts the limit into force on this thread until the guard is dropped. Of several budgets the
    /// newest is in force, in whichever order the guards are dropped:
    /// `budget = MemoryBudget::bytes(n).install();` replaces one by another.
    ///
    /// # Cost
    ///
    /// Nothing by itself. Every operation of the thread is then recorded: two allocations each, its
    /// node and its recipe, and one for each operand that is not managed; its operands live as long
    /// as its result may be needed. One on gradients takes a single small allocation, for the count
    /// of its result's bytes. To make room, the budget examines a few of the tensors that may be
    /// evicted, those with the least cost for their bytes;
    /// [`RematStats::search_time`](crate::RematStats::search_time) is the time of these searches. A
    /// step that runs the same operations as the one before, with as many live bytes, evicts the
    /// same tensors without a search.
    pub fn install(self) -> InstalledBudget {
        let installed = Installed::new(self);
        let _in_force = context::install(installed.clone());
        InstalledBudget {
            installed,
            _in_force,
        }
    }

    /// Puts the limit into force on every thread of the process that has no budget of its own,
    /// until the guard is dropped: each of these threads has the limit on each device, counted
    /// separately. For ranks that are threads and for the Learner's workers. Of several budgets the
    /// newest is in force. A thread applies it from its next operation on a tensor of
    /// [`Remat`](crate::Remat).
    ///
    /// # Cost
    ///
    /// That of [`Self::install`] on every such thread, also on one that does not train but, for
    /// example, prepares batches.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_checkpoint::{MemoryBudget, Remat, RematStats};
    /// use burn_flex::Flex;
    ///
    /// let _budget = MemoryBudget::bytes(16 << 10).install_for_process();
    /// let rank = std::thread::spawn(|| {
    ///     let x = Tensor::<Remat<Flex>, 2>::ones([64, 64], &Default::default());
    ///     let held: Vec<_> = (0..4).map(|_| x.clone().exp()).collect();
    ///     drop(held);
    ///     RematStats::of_thread().evicted_operations
    /// });
    /// assert!(rank.join().unwrap() > 0);
    /// ```
    pub fn install_for_process(self) -> ProcessBudget {
        ProcessBudget(context::change_process(|budgets| budgets.push(self)))
    }
}

/// The guard of a [`MemoryBudget`] of the process: ends it when dropped, on whichever thread.
#[derive(Debug)]
#[must_use = "the budget ends when this is dropped"]
pub struct ProcessBudget(u64);

impl Drop for ProcessBudget {
    fn drop(&mut self) {
        context::change_process(|budgets| budgets.remove(self.0));
    }
}

/// Ends a step of the calling thread for the budget in force, its own or the process's, if there is
/// one, as [`InstalledBudget::step`] does: also for optimizers whose state on the device differs
/// between ranks, which must evict the same tensors in forward and backward.
pub fn end_step() {
    if let Some(installed) = context::in_force() {
        step(&installed);
    }
}

fn step(installed: &Installed) {
    context::begin(Phase::Forward);
    installed.budgets().for_each(|budget| budget.step_ends());
}

/// The guard of an installed [`MemoryBudget`]: ends it when dropped.
#[must_use = "the budget ends when this is dropped"]
pub struct InstalledBudget {
    installed: Arc<Installed>,
    _in_force: InForce,
}

impl std::fmt::Debug for InstalledBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.installed.settings.fmt(f)
    }
}

impl InstalledBudget {
    /// Ends a step: live tensors are now parameters, optimizer state and results, which are neither
    /// evicted nor counted any more. Takes time in proportion to the number of live tensors.
    ///
    /// # Panics
    ///
    /// With [`RematError::BudgetTooSmall`](crate::RematError::BudgetTooSmall) if this step measured
    /// the tape, the fraction of it is too small, and the budget is [strict](MemoryBudget::strict).
    pub fn step(&self) {
        step(&self.installed);
    }

    /// The limit on each device in bytes; `None` while it is measured.
    pub fn limit_bytes(&self) -> Vec<Option<u64>> {
        let budgets = self.installed.budgets();
        budgets.map(|budget| budget.limit()).collect()
    }

    /// Bytes counted now, of all devices.
    pub fn live_bytes(&self) -> u64 {
        self.installed.budgets().map(|budget| budget.live()).sum()
    }

    /// The most bytes that were counted at one time on any device.
    pub fn peak_bytes(&self) -> u64 {
        let budgets = self.installed.budgets();
        let peaks = budgets.map(|budget| budget.counts.highest());
        peaks.max().unwrap_or(0)
    }
}

impl Drop for InstalledBudget {
    fn drop(&mut self) {
        let budgets = self.installed.budgets();
        budgets.for_each(|budget| budget.step_is_over());
    }
}
