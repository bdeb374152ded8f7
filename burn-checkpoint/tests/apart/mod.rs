//! Budgets of one test, which runs beside others in its process.

use std::cell::Cell;
use std::mem::forget;

use burn_checkpoint::{InstalledBudget, MemoryBudget, apart};

thread_local! {
    static IS_APART: Cell<bool> = const { Cell::new(false) };
}

/// Takes the thread of a test out of the process's budgets, as long as it lives.
pub fn keep_apart() {
    if !IS_APART.replace(true) {
        forget(apart());
    }
}

/// As [`MemoryBudget::install`], on the thread of the test alone.
pub trait InstallApart {
    fn install_apart(self) -> InstalledBudget;
}

impl InstallApart for MemoryBudget {
    fn install_apart(self) -> InstalledBudget {
        keep_apart();
        self.install()
    }
}
