//! A budget in force on a thread: one [`Budget`] a device.

use std::sync::Arc;

use burn_backend::DeviceId;
use parking_lot::Mutex;

use super::limiter::Budget;
use super::settings::MemoryBudget;
use crate::memory::{Counts, MemoryStats, Totals};

/// A budget in force on a thread, with the counters of each device.
pub(crate) struct Installed {
    pub settings: MemoryBudget,
    devices: Mutex<Vec<(Arc<MemoryStats>, Arc<Budget>)>>,
}

impl Installed {
    pub fn new(settings: MemoryBudget) -> Arc<Self> {
        Arc::new(Self {
            settings,
            devices: Mutex::new(Vec::new()),
        })
    }

    /// The counters of a device, with its budget.
    pub fn on(&self, device: DeviceId, thread: &Arc<Totals>) -> Arc<MemoryStats> {
        let mut devices = self.devices.lock();
        if let Some((memory, _)) = devices.iter().find(|(memory, _)| memory.device == device) {
            return memory.clone();
        }
        let counts = Arc::new(Counts::default());
        let budget = Arc::new(Budget::new(self.settings, counts.clone()));
        let memory = MemoryStats::new(device, counts, Some(budget.clone()), thread);
        devices.push((memory.clone(), budget));
        memory
    }

    /// The budgets of all devices.
    pub fn budgets(&self) -> Vec<Arc<Budget>> {
        let devices = self.devices.lock();
        devices.iter().map(|(_, budget)| budget.clone()).collect()
    }
}
