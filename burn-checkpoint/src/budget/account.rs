//! What each thread holds under a budget of the process.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use burn_backend::DeviceId;
use parking_lot::Mutex;

use crate::budget::memory::MemoryStats;
use crate::budget::{Budget, MemoryBudget};
use crate::observe::stats::Counts;

/// A budget that is installed, with an account of each thread that it came into force on.
pub(crate) struct Installed {
    pub settings: MemoryBudget,
    /// Whether its guard is gone: then threads close their accounts.
    is_over: AtomicBool,
    accounts: Mutex<Vec<Weak<Account>>>,
    /// The highest peak of the accounts that are gone, with their threads.
    earlier_peak: AtomicU64,
}

impl Installed {
    pub fn new(settings: MemoryBudget) -> Arc<Self> {
        Arc::new(Self {
            settings,
            is_over: AtomicBool::new(false),
            accounts: Mutex::default(),
            earlier_peak: AtomicU64::new(0),
        })
    }

    /// Opens the account of a thread.
    pub fn open(self: &Arc<Self>) -> Arc<Account> {
        let account = Arc::new(Account {
            budget: self.clone(),
            devices: Mutex::default(),
        });
        let mut accounts = self.accounts.lock();
        accounts.retain(|account| account.strong_count() > 0);
        accounts.push(Arc::downgrade(&account));
        account
    }

    pub fn end(&self) {
        self.is_over.store(true, Ordering::Release);
    }

    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// The budgets of all devices of all threads that have not ended.
    pub fn budgets(&self) -> Vec<Arc<Budget>> {
        let accounts: Vec<_> = {
            let accounts = self.accounts.lock();
            accounts.iter().filter_map(Weak::upgrade).collect()
        };
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
    pub budget: Arc<Installed>,
    devices: Mutex<Vec<Arc<MemoryStats>>>,
}

impl Account {
    /// Counters of a device on which the thread has none yet.
    pub fn open_device(&self, device: DeviceId, thread: &Arc<Counts>) -> Arc<MemoryStats> {
        let memory = MemoryStats::new(device, thread, Some(self.budget.settings));
        self.devices.lock().push(memory.clone());
        memory
    }

    pub fn devices(&self) -> Vec<Arc<MemoryStats>> {
        self.devices.lock().clone()
    }

    pub fn budgets(&self) -> impl Iterator<Item = Arc<Budget>> {
        let devices = self.devices().into_iter();
        devices.filter_map(|memory| memory.budget().cloned())
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        let peaks = self.budgets().map(|budget| budget.counts.highest());
        let peak = peaks.max().unwrap_or(0);
        self.budget.earlier_peak.fetch_max(peak, Ordering::Relaxed);
    }
}
