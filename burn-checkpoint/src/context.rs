//! What this thread is doing: open scopes, an installed budget, its counters.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use burn_backend::DeviceId;
use parking_lot::Mutex;

use crate::budget::{Costs, Installed, Phase, Step};
use crate::ledger::Ledger;
use crate::node::AnyEntry;
use crate::op::OpInfo;
use crate::policy::Fate;
use crate::scope::{Frame, Scope};
use crate::stats::RematStats;

thread_local! {
    static RECORDS: Cell<bool> = const { Cell::new(false) };
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
    static CONTEXT: RefCell<Context> = const { RefCell::new(Context::new()) };
}

/// Every thread's counters, for sums over the process.
static LEDGERS: Mutex<Vec<Weak<Ledger>>> = Mutex::new(Vec::new());

struct Context {
    /// Operations so far.
    clock: u64,
    frames: Vec<Frame>,
    budget: Option<Arc<Installed>>,
    step: Step,
    /// The ledgers in use, one a device.
    ledgers: Vec<Arc<Ledger>>,
    /// Ledgers of budgets that ended while tensors were alive.
    retired: Vec<Arc<Ledger>>,
    /// The counters of budgets that ended.
    past: RematStats,
    collected: Vec<Arc<dyn AnyEntry>>,
    /// Whether a tensor of `Remat` was met since the outermost scope began.
    met: bool,
}

impl Context {
    const fn new() -> Self {
        Self {
            clock: 0,
            frames: Vec::new(),
            budget: None,
            step: Step::FIRST,
            ledgers: Vec::new(),
            retired: Vec::new(),
            past: RematStats::ZERO,
            collected: Vec::new(),
            met: false,
        }
    }

    fn ledger(&mut self, device: DeviceId) -> Arc<Ledger> {
        if let Some(ledger) = self.ledgers.iter().find(|x| x.device() == device) {
            return ledger.clone();
        }
        let budget = self.budget.as_ref().map(|budget| budget.on(device));
        let ledger = Arc::new(Ledger::new(device, budget));
        self.ledgers.push(ledger.clone());
        let mut all = LEDGERS.lock();
        all.retain(|ledger| ledger.strong_count() > 0);
        all.push(Arc::downgrade(&ledger));
        ledger
    }

    /// Puts the ledgers aside: the next tensors are counted under another budget.
    fn retire(&mut self) {
        let retired = self.retired.drain(..).chain(self.ledgers.drain(..));
        let (live, done): (Vec<_>, _) = retired.partition(|ledger| ledger.live() > 0);
        for ledger in done {
            self.past = self.past + ledger.stats();
        }
        self.retired = live;
    }

    fn update(&self) {
        RECORDS.set(!self.frames.is_empty() || self.budget.is_some());
    }
}

/// Whether operations of this thread are recorded.
#[inline]
pub(crate) fn records() -> bool {
    RECORDS.get()
}

/// What an operation that is to be recorded has to know.
pub(crate) struct Moment {
    /// The number of the operation.
    pub clock: u64,
    /// The innermost scope.
    pub scope: Option<Arc<Scope>>,
    /// What that scope does with the result.
    pub fate: Fate,
    /// Where in a step the thread is, under a budget.
    pub step: Option<Step>,
    /// Where that budget takes costs from.
    pub costs: Costs,
    /// The counters that the last tensors were added to.
    pub ledger: Option<Arc<Ledger>>,
}

/// Begins an operation.
#[inline]
pub(crate) fn tick(op: &OpInfo) -> Moment {
    CONTEXT.with_borrow_mut(|context| {
        context.clock += 1;
        context.met = true;
        let frame = context.frames.last();
        let budget = context.budget.as_ref();
        Moment {
            clock: context.clock,
            scope: frame.map(|frame| frame.scope.clone()),
            fate: frame.map_or(Fate::Recompute, |frame| frame.scope.policy.fate(op)),
            step: budget.map(|_| context.step),
            costs: budget.map_or(Costs::Estimated, |budget| budget.costs()),
            ledger: context.ledgers.last().cloned(),
        }
    })
}

/// The counters for new tensors on a device.
pub(crate) fn ledger(device: DeviceId) -> Arc<Ledger> {
    CONTEXT.with_borrow_mut(|context| context.ledger(device))
}

/// The number of the last operation.
pub(crate) fn clock() -> u64 {
    CONTEXT.with_borrow(|context| context.clock)
}

/// The counters that the last tensors were added to.
pub(crate) fn recent_ledger() -> Option<Arc<Ledger>> {
    CONTEXT.with_borrow(|context| context.ledgers.last().cloned())
}

/// A backward pass begins.
pub(crate) fn backward_begins() -> Option<Step> {
    change_phase(Phase::Backward, Step::backward, Installed::backward_begins)
}

/// A forward pass begins.
pub(crate) fn forward_begins() -> Option<Step> {
    change_phase(Phase::Forward, Step::forward, Installed::forward_begins)
}

fn change_phase(phase: Phase, next: fn(Step) -> Step, tell: fn(&Installed)) -> Option<Step> {
    let (step, changed) = CONTEXT.with_borrow_mut(|context| {
        let budget = context.budget.clone()?;
        // Backward after backward, where nothing told that there was a forward pass in between.
        let changed = phase == Phase::Backward || context.step.phase != phase;
        let changed = changed.then_some(budget);
        context.step = next(context.step);
        Some((context.step, changed))
    })?;
    if let Some(budget) = changed {
        tell(&budget);
    }
    Some(step)
}

/// Opens a scope. Returns how many were open.
pub(crate) fn push(make: impl FnOnce(Option<&Arc<Scope>>) -> Frame) -> usize {
    forward_begins();
    CONTEXT.with_borrow_mut(|context| {
        let depth = context.frames.len();
        if depth == 0 {
            context.met = false;
        }
        let frame = make(context.frames.last().map(|frame| &frame.scope));
        context.frames.push(frame);
        context.update();
        depth
    })
}

/// Closes all scopes but the outermost `depth`, and gives the last of those that it closes.
pub(crate) fn pop(depth: usize) -> Option<Frame> {
    CONTEXT.with_borrow_mut(|context| {
        // More than one only if a panic left some open.
        context.frames.truncate(depth + 1);
        let closed = (context.frames.len() > depth).then(|| context.frames.pop());
        context.update();
        closed.flatten()
    })
}

/// The innermost scope.
pub(crate) fn scope() -> Option<Arc<Scope>> {
    CONTEXT.with_borrow(|context| context.frames.last().map(|frame| frame.scope.clone()))
}

/// Whether a tensor of `Remat` was met since the outermost scope began.
pub(crate) fn met() -> bool {
    CONTEXT.with_borrow(|context| context.met)
}

/// Whether the results of a scope are being collected.
#[inline]
pub(crate) fn is_collecting() -> bool {
    COLLECTING.get()
}

/// Adds a result of the scope that ends; `None` if it is not managed.
pub(crate) fn collect(node: Option<Arc<dyn AnyEntry>>) {
    CONTEXT.with_borrow_mut(|context| {
        context.met = true;
        context.collected.extend(node);
    });
}

/// Runs a function that touches results, and gives those that are managed.
pub(crate) fn collecting(touch: impl FnOnce()) -> Vec<Arc<dyn AnyEntry>> {
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            COLLECTING.set(false);
        }
    }
    let done = Done;
    COLLECTING.set(true);
    touch();
    drop(done);
    CONTEXT.with_borrow_mut(|context| std::mem::take(&mut context.collected))
}

/// Replaces the thread's budget, and gives the one before.
pub(crate) fn set_budget(budget: Option<Arc<Installed>>) -> Option<Arc<Installed>> {
    CONTEXT.with_borrow_mut(|context| {
        context.retire();
        context.step = context.step.forward();
        let before = std::mem::replace(&mut context.budget, budget);
        context.update();
        before
    })
}

/// Shows the counters of this thread.
pub(crate) fn ledgers_of_thread(visit: &mut dyn FnMut(&Ledger)) -> RematStats {
    let (ledgers, past) = CONTEXT.with_borrow(|context| {
        let all = context.ledgers.iter().chain(&context.retired).cloned();
        (all.collect::<Vec<_>>(), context.past)
    });
    ledgers.iter().for_each(|ledger| visit(ledger));
    past
}

/// Forgets the counters of budgets that ended.
pub(crate) fn forget_past() {
    CONTEXT.with_borrow_mut(|context| context.past = RematStats::ZERO);
}

/// Shows the counters of all threads.
pub(crate) fn ledgers_of_process(visit: &mut dyn FnMut(&Ledger)) {
    let all: Vec<_> = LEDGERS.lock().iter().filter_map(Weak::upgrade).collect();
    all.iter().for_each(|ledger| visit(ledger));
}
