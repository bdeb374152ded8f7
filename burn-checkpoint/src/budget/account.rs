//! What each thread holds under a budget of the process.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn_backend::DeviceId;
use parking_lot::Mutex;

use crate::budget::memory::MemoryStats;
use crate::budget::{Budget, MemoryBudget};
use crate::observe::stats::Counts;

/// A budget that is installed, with an account of each thread that it came into force on.
pub(crate) struct Installed {
    pub settings: MemoryBudget,
    /// Also those of threads that have ended, until nothing is left of what they made.
    accounts: Mutex<Vec<Arc<Account>>>,
    /// The highest peak of the accounts that are closed.
    earlier_peak: AtomicU64,
}

impl Installed {
    pub fn new(settings: MemoryBudget) -> Arc<Self> {
        Arc::new(Self {
            settings,
            accounts: Mutex::default(),
            earlier_peak: AtomicU64::new(0),
        })
    }

    /// Opens the account of a thread, and closes those of threads that have ended.
    pub fn open(self: &Arc<Self>) -> Arc<Account> {
        let account = Arc::new(Account {
            settings: self.settings,
            budget: Arc::downgrade(self),
            devices: Mutex::default(),
        });
        let ended: Vec<_> = {
            let mut accounts = self.accounts.lock();
            let has_ended = |account: &mut Arc<Account>| account.has_ended();
            let ended = accounts.extract_if(.., has_ended).collect();
            accounts.push(account.clone());
            ended
        };
        for budget in ended.iter().flat_map(|account| account.budgets()) {
            let peak = budget.counts.highest();
            self.earlier_peak.fetch_max(peak, Ordering::Relaxed);
            budget.step_is_over();
        }
        account
    }

    /// The budgets of all devices of all threads.
    pub fn budgets(&self) -> Vec<Arc<Budget>> {
        let accounts = self.accounts.lock().clone();
        accounts.iter().flat_map(|it| it.budgets()).collect()
    }

    /// The most bytes that a thread held on one device.
    pub fn peak_bytes(&self) -> u64 {
        let now = self.budgets();
        let peaks = now.iter().map(|budget| budget.counts.highest());
        peaks.fold(self.earlier_peak.load(Ordering::Relaxed), u64::max)
    }
}

/// What one thread holds under a budget, by device.
pub(crate) struct Account {
    settings: MemoryBudget,
    budget: Weak<Installed>,
    devices: Mutex<Vec<Arc<MemoryStats>>>,
}

impl Account {
    pub fn settings(&self) -> MemoryBudget {
        self.settings
    }

    pub fn is_of(&self, budget: &Arc<Installed>) -> bool {
        Weak::as_ptr(&self.budget) == Arc::as_ptr(budget)
    }

    /// Whether the budget's guard is gone.
    pub fn is_over(&self) -> bool {
        self.budget.strong_count() == 0
    }

    /// Whether its thread has ended, and what that made is gone. While it lives the thread has the
    /// account too.
    fn has_ended(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) == 1 && self.budgets().all(|budget| budget.live() == 0)
    }

    /// Counters of a device on which the thread has none yet.
    pub fn open_device(&self, device: DeviceId, thread: &Arc<Counts>) -> Arc<MemoryStats> {
        let memory = MemoryStats::new(device, thread, Some(self.settings));
        self.devices.lock().push(memory.clone());
        memory
    }

    pub fn devices(&self) -> Vec<Arc<MemoryStats>> {
        self.devices.lock().clone()
    }

    pub fn budgets(&self) -> impl Iterator<Item = Arc<Budget>> + use<> {
        let devices = self.devices().into_iter();
        devices.filter_map(|memory| memory.budget().cloned())
    }
}
