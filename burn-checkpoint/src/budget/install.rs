//! Putting a memory budget into force.

use std::sync::Arc;

use crate::budget::MemoryBudget;
use crate::budget::account::{Account, Installed};
use crate::budget::in_force::Budgets;
use crate::record::context;
use crate::record::step::Phase;

impl MemoryBudget {
    /// Puts the limit into force on every thread of the process until the guard is dropped: each
    /// thread has the limit on each device, counted separately. A thread applies it from its next
    /// operation on a tensor of [`Remat`](crate::Remat), the calling one from now on. Install it
    /// once, before ranks that are threads begin. Of several budgets the newest is in force, in
    /// whichever order the guards are dropped: `budget = MemoryBudget::bytes(n).install();`
    /// replaces one by another.
    ///
    /// # Cost
    ///
    /// Nothing by itself. Every operation is then recorded, also of a thread that does not train
    /// but prepares batches: two allocations each, its node and its recipe, and one for each
    /// operand that is not managed; its operands live as long as its result may be needed. One on
    /// gradients takes a single small allocation, for the count of its result's bytes. To make room,
    /// the budget examines a few of the tensors that may be evicted, those with the least cost for
    /// their bytes; [`RematStats::search_time`](crate::RematStats::search_time) is the time of these
    /// searches. A step that runs the same operations as the one before, with as many live bytes,
    /// evicts the same tensors without a search.
    ///
    /// ```
    /// use burn::tensor::Tensor;
    /// use burn_checkpoint::{MemoryBudget, Remat, RematStats};
    /// use burn_flex::Flex;
    ///
    /// let _budget = MemoryBudget::bytes(16 << 10).install();
    /// let rank = std::thread::spawn(|| {
    ///     let x = Tensor::<Remat<Flex>, 2>::ones([64, 64], &Default::default());
    ///     let held: Vec<_> = (0..4).map(|_| x.clone().exp()).collect();
    ///     drop(held);
    ///     RematStats::of_thread().evicted_operations
    /// });
    /// assert!(rank.join().unwrap() > 0);
    /// ```
    pub fn install(self) -> InstalledBudget {
        let installed = Installed::new(self);
        let budgets = Budgets::of_thread();
        let ticket = budgets.push(installed.clone());
        context::follow();
        InstalledBudget {
            installed,
            budgets,
            ticket,
        }
    }
}

/// Ends a step of the calling thread for the budget in force, if there is one, as
/// [`InstalledBudget::step`] does: also for optimizers whose state on the device differs between
/// ranks, which must evict the same tensors in forward and backward.
pub fn end_step() {
    if let Some(account) = context::in_force() {
        step(&account);
    }
}

/// Records every operation until the guard is dropped, if no budget with a limit does: one without
/// a limit may be in force for another recording, which may end before this one.
pub(crate) fn record_operations() -> Option<InstalledBudget> {
    let has_limit = context::in_force().is_some_and(|account| account.settings().has_limit());
    (!has_limit).then(|| MemoryBudget::unlimited().install())
}

fn step(account: &Account) {
    context::begin(Phase::Forward);
    account.budgets().for_each(|budget| budget.step_ends());
}

/// The guard of an installed [`MemoryBudget`]: ends it when dropped, on whichever thread. Others
/// follow with their next operation.
#[must_use = "the budget ends when this is dropped"]
pub struct InstalledBudget {
    installed: Arc<Installed>,
    budgets: Arc<Budgets>,
    ticket: u64,
}

impl std::fmt::Debug for InstalledBudget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.installed.settings.fmt(f)
    }
}

impl InstalledBudget {
    /// Ends a step of the calling thread: its live tensors are now parameters, optimizer state and
    /// results, which are neither evicted nor counted any more. Before the first step: what was
    /// made so far is not counted, nor measured by a [fraction](MemoryBudget::fraction). Takes time
    /// in proportion to the number of live tensors.
    ///
    /// # Panics
    ///
    /// With [`RematError::BudgetTooSmall`](crate::RematError::BudgetTooSmall) if this step measured
    /// the tape, the fraction of it is too small, and the budget is [strict](MemoryBudget::strict).
    pub fn step(&self) {
        if let Some(account) = context::account(&self.installed) {
            step(&account);
        }
    }

    /// The limit in bytes on each device of each thread that made tensors under it; `None` while it
    /// is measured.
    pub fn limit_bytes(&self) -> Vec<Option<u64>> {
        let budgets = self.installed.budgets();
        budgets.iter().map(|budget| budget.limit()).collect()
    }

    /// Bytes counted now, of all threads and devices.
    pub fn live_bytes(&self) -> u64 {
        let budgets = self.installed.budgets();
        budgets.iter().map(|budget| budget.live()).sum()
    }

    /// The most bytes that were counted at one time of any thread on any device.
    pub fn peak_bytes(&self) -> u64 {
        self.installed.peak_bytes()
    }
}

impl Drop for InstalledBudget {
    fn drop(&mut self) {
        let budgets = self.installed.budgets();
        budgets.iter().for_each(|budget| budget.step_is_over());
        self.budgets.remove(self.ticket);
        context::follow();
    }
}
