//! Which budget is in force: the newest of the process, or of a thread that is apart.

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock};

use parking_lot::Mutex;

use crate::budget::account::Installed;
use crate::budget::stack::Stack;
use crate::record::context;

/// The budgets of the process.
static OF_PROCESS: LazyLock<Arc<Budgets>> = LazyLock::new(Arc::default);

/// The number of changes of budgets, so that each thread sees cheaply whether it has to look.
static CHANGES: AtomicU64 = AtomicU64::new(0);

/// Budgets, one for each guard; the newest is in force on every thread that is under them.
pub(crate) struct Budgets(Mutex<Stack<Arc<Installed>>>);

impl Default for Budgets {
    fn default() -> Self {
        Self(Mutex::new(Stack::new()))
    }
}

impl Budgets {
    /// Those that this thread is under: the process's, unless it is [`apart`].
    pub fn of_thread() -> Arc<Self> {
        context::own_budgets().unwrap_or_else(|| OF_PROCESS.clone())
    }

    /// Puts a budget in force: each thread follows with its next operation. Returns its ticket.
    pub fn push(&self, installed: Arc<Installed>) -> u64 {
        self.change(|stack| stack.push(installed))
    }

    /// Takes a budget out of force.
    pub fn remove(&self, ticket: u64) {
        drop(self.change(|stack| stack.remove(ticket)));
    }

    fn change<R>(&self, change: impl FnOnce(&mut Stack<Arc<Installed>>) -> R) -> R {
        let mut stack = self.0.lock();
        CHANGES.fetch_add(1, Ordering::Release);
        change(&mut stack)
    }

    /// The newest one, with the number of changes that it is as of.
    pub fn newest(&self) -> (Option<Arc<Installed>>, u64) {
        let stack = self.0.lock();
        (stack.top().cloned(), changes())
    }
}

/// The number of changes of budgets so far, of any thread.
#[inline]
pub(crate) fn changes() -> u64 {
    CHANGES.load(Ordering::Acquire)
}

/// Takes this thread out of the budgets of the process until the guard is dropped: none of those is
/// in force on it, and what it installs is in force on no other thread. For a step that runs beside
/// a training without being a part of it, such as an estimate's, and for tests. Threads that it
/// starts are not apart.
///
/// The account of a budget that was in force goes on afterwards, with a new forward pass: call it
/// between steps.
///
/// ```
/// use burn_checkpoint::{MemoryBudget, Recorder, apart, recorder};
///
/// let _budget = MemoryBudget::bytes(16 << 10).install();
/// assert_eq!(recorder(), Recorder::Budget);
/// let beside = apart();
/// assert_eq!(recorder(), Recorder::None);
/// drop(beside);
/// assert_eq!(recorder(), Recorder::Budget);
/// ```
pub fn apart() -> Apart {
    let ticket = context::change_own_budgets(|own| own.push(Arc::default()));
    Apart {
        ticket,
        _of_thread: PhantomData,
    }
}

/// The guard of a thread that has budgets [`apart`] from the process's.
#[derive(Debug)]
#[must_use = "the thread is under the process's budgets again when this is dropped"]
pub struct Apart {
    ticket: u64,
    /// It ends on the thread that it began on.
    _of_thread: PhantomData<*const ()>,
}

impl Drop for Apart {
    fn drop(&mut self) {
        context::change_own_budgets(|own| own.remove(self.ticket));
    }
}
