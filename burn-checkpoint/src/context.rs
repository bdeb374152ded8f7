//! What this thread is doing: open scopes, an installed budget, its counters.

use std::cell::{Cell, RefCell};
use std::sync::{Arc, Weak};

use burn_backend::DeviceId;

use crate::budget::{Costs, Installed, Phase, Step};
use crate::ledger::Ledger;
use crate::node::AnyEntry;
use crate::op::OpInfo;
use crate::policy::Fate;
use crate::scope::{Frame, Scope};
use crate::stack::{Stack, Ticket};
use crate::stats::RematStats;
use crate::totals::Totals;

thread_local! {
    static RECORDS: Cell<bool> = const { Cell::new(false) };
    static COLLECTING: Cell<bool> = const { Cell::new(false) };
    static CONTEXT: RefCell<Context> = const { RefCell::new(Context::new()) };
}

struct Context {
    /// Operations so far.
    clock: u64,
    frames: Vec<Frame>,
    /// Those of all guards, of which the newest is in force; `None` where budgets are suspended.
    budgets: Stack<Option<Arc<Installed>>>,
    step: Step,
    /// The ledgers in use, one a device.
    ledgers: Vec<Arc<Ledger>>,
    /// What all ledgers of the thread add up to, those of budgets that ended too.
    totals: Option<Arc<Totals>>,
    collected: Vec<Arc<dyn AnyEntry>>,
    /// Room for the tensors of the next scope: that of one that ended.
    spare: Vec<Weak<dyn AnyEntry>>,
    /// Whether a tensor of `Remat` was met since the outermost scope began.
    met: bool,
}

impl Context {
    const fn new() -> Self {
        Self {
            clock: 0,
            frames: Vec::new(),
            budgets: Stack::new(),
            step: Step::FIRST,
            ledgers: Vec::new(),
            totals: None,
            collected: Vec::new(),
            spare: Vec::new(),
            met: false,
        }
    }

    fn totals(&mut self) -> &Arc<Totals> {
        self.totals.get_or_insert_with(Totals::new)
    }

    fn ledger(&mut self, device: DeviceId) -> Arc<Ledger> {
        if let Some(ledger) = self.ledgers.iter().find(|x| x.device() == device) {
            return ledger.clone();
        }
        let totals = self.totals().clone();
        let ledger = match self.budget() {
            Some(budget) => budget.on(device, &totals),
            None => {
                let ledger = Arc::new(Ledger::new(device, None, totals.clone()));
                totals.add(&ledger);
                ledger
            }
        };
        ledger.set_current(true);
        self.ledgers.push(ledger.clone());
        ledger
    }

    /// The budget in force.
    fn budget(&self) -> Option<&Arc<Installed>> {
        self.budgets.top()?.as_ref()
    }

    /// Another budget is in force: the ledgers are put aside, and the next tensors counted under it.
    fn change_budget(&mut self) {
        for ledger in self.ledgers.drain(..) {
            ledger.set_current(false);
        }
        self.step = self.step.forward();
        self.update();
    }

    fn update(&self) {
        RECORDS.set(!self.frames.is_empty() || self.budget().is_some());
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
    /// The counters of the device that was met last: most often those of the operation.
    recent: Option<Arc<Ledger>>,
}

impl Moment {
    /// The counters for results on a device.
    #[inline]
    pub fn ledger(&self, device: DeviceId) -> Arc<Ledger> {
        match &self.recent {
            Some(ledger) if ledger.device() == device => ledger.clone(),
            _ => ledger(device),
        }
    }
}

/// Begins an operation.
#[inline]
pub(crate) fn tick(op: &OpInfo) -> Moment {
    let mut moment = CONTEXT.with_borrow_mut(|context| {
        context.clock += 1;
        context.met = true;
        let budget = context.budget();
        Moment {
            clock: context.clock,
            scope: context.frames.last().map(|frame| frame.scope.clone()),
            fate: Fate::Recompute,
            step: budget.map(|_| context.step),
            costs: budget.map_or(Costs::Estimated, |budget| budget.costs()),
            recent: context.ledgers.last().cloned(),
        }
    });
    // Outside of the borrow: it may be a function of the user's.
    if let Some(scope) = &moment.scope {
        moment.fate = scope.policy.fate(op);
    }
    moment
}

/// The counters for new tensors on a device.
pub(crate) fn ledger(device: DeviceId) -> Arc<Ledger> {
    CONTEXT.with_borrow_mut(|context| context.ledger(device))
}

/// The number of the last operation.
pub(crate) fn clock() -> u64 {
    CONTEXT.with_borrow(|context| context.clock)
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
        let budget = context.budget().cloned()?;
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

/// Opens a scope, which is told of the one around it and gets an empty list. Returns how many were open.
pub(crate) fn push(
    make: impl FnOnce(Option<&Arc<Scope>>, Vec<Weak<dyn AnyEntry>>) -> Frame,
) -> usize {
    forward_begins();
    CONTEXT.with_borrow_mut(|context| {
        let depth = context.frames.len();
        if depth == 0 {
            context.met = false;
        }
        let spare = std::mem::take(&mut context.spare);
        let frame = make(context.frames.last().map(|frame| &frame.scope), spare);
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

/// So many tensors a scope may have for its lists to be kept for the next one.
const USUAL_OPERATIONS: usize = 1024;

/// Takes back the lists of a scope that ended, for the next one.
pub(crate) fn give_back(mut nodes: Vec<Weak<dyn AnyEntry>>, mut results: Vec<Arc<dyn AnyEntry>>) {
    if nodes.capacity().max(results.capacity()) > USUAL_OPERATIONS {
        return;
    }
    // Outside of the borrow: these may be the last references.
    nodes.clear();
    results.clear();
    let before = CONTEXT.with_borrow_mut(|context| {
        (
            std::mem::replace(&mut context.spare, nodes),
            std::mem::replace(&mut context.collected, results),
        )
    });
    drop(before);
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
    fn take() -> Vec<Arc<dyn AnyEntry>> {
        CONTEXT.with_borrow_mut(|context| std::mem::take(&mut context.collected))
    }
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            COLLECTING.set(false);
            // Nothing, unless `touch` panics: the next scope would take it for its own results.
            drop(take());
        }
    }
    let _done = Done;
    COLLECTING.set(true);
    touch();
    take()
}

/// Puts a budget in force, or none, until the ticket is given back.
pub(crate) fn install(budget: Option<Arc<Installed>>) -> Ticket {
    CONTEXT.with_borrow_mut(|context| {
        let ticket = context.budgets.push(budget);
        context.change_budget();
        ticket
    })
}

/// Takes back what was put in force. That of the newest guard that is left is in force then.
pub(crate) fn uninstall(ticket: Ticket) {
    CONTEXT.with_borrow_mut(|context| {
        let (_, was_in_force) = context.budgets.remove(ticket);
        if was_in_force {
            context.change_budget();
        }
    });
}

/// Runs a function while no budget is in force.
pub(crate) fn without_budget<R>(run: impl FnOnce() -> R) -> R {
    struct Aside(Ticket);
    impl Drop for Aside {
        fn drop(&mut self) {
            uninstall(self.0);
        }
    }
    let in_force = CONTEXT.with_borrow(|context| context.budget().is_some());
    let _aside = in_force.then(|| Aside(install(None)));
    run()
}

/// What new tensors of this thread are counted in, all devices: not those made under another budget.
pub(crate) fn current_stats() -> RematStats {
    CONTEXT.with_borrow(|context| {
        let ledgers = context.ledgers.iter();
        ledgers.fold(RematStats::ZERO, |sum, ledger| sum + ledger.stats())
    })
}

/// What all managed tensors of this thread add up to.
pub(crate) fn totals() -> Arc<Totals> {
    CONTEXT.with_borrow_mut(|context| context.totals().clone())
}
