//! What this thread is doing: its open scopes, the budget in force, its counters.

use std::cell::RefCell;
use std::sync::{Arc, Weak};

use burn_backend::{Backend, DeviceId, DeviceOps};
use burn_decorator::cell::with_value;
use burn_decorator::gradient;

use crate::budget::account::{Account, Installed};
use crate::budget::in_force::{self, Budgets};
use crate::budget::memory::MemoryStats;
use crate::budget::stack::Stack;
use crate::node::drops;
use crate::node::entry::AnyEntry;
use crate::observe::stats::{self, Counts, RematStats};
use crate::record::flags::{FLAGS, Flags, Raised};
use crate::record::op::OpInfo;
use crate::record::step::{Phase, Read, Step, Told};
use crate::scope::policy::Policy;
use crate::scope::region::Region;
use crate::scope::tiny::Sizes;
use crate::scope::units::{self, UnitPass};

thread_local! {
    static CONTEXT: RefCell<Context> = const {
        RefCell::new(Context {
            frames: Vec::new(),
            ended_units: Vec::new(),
            own_budgets: Stack::new(),
            accounts: Vec::new(),
            in_force: None,
            is_unrecorded: false,
            counters: Vec::new(),
            counts: None,
        })
    };
    /// The managed results of the scope that ends.
    static COLLECTED: RefCell<Option<Vec<Arc<dyn AnyEntry>>>> = const { RefCell::new(None) };
}

/// An open scope.
pub(crate) struct Frame {
    pub region: Arc<Region>,
    /// The tensors that were made in it so far.
    pub nodes: Vec<Weak<dyn AnyEntry>>,
    /// Of a unit: those that were made in the unit before, as the first ones of this.
    pub adopted: Vec<Weak<dyn AnyEntry>>,
    pub sizes: Sizes,
}

/// The scope of a unit that has ended.
struct EndedUnit {
    frame: Frame,
    /// The number of scopes around it.
    around: usize,
}

struct Context {
    frames: Vec<Frame>,
    /// Scopes of units that have ended, and whose tensors are not decided about.
    ended_units: Vec<EndedUnit>,
    /// Those that the thread is under while it is apart from the process's, one for each guard.
    own_budgets: Stack<Arc<Budgets>>,
    /// Its accounts of the budgets that have been in force on it and are not over.
    accounts: Vec<Arc<Account>>,
    /// That of the budget in force.
    in_force: Option<Arc<Account>>,
    /// Whether scopes and budgets are left out of [`unrecorded`] work.
    is_unrecorded: bool,
    /// The counters of new tensors, one entry for each device.
    counters: Vec<Arc<MemoryStats>>,
    /// The thread's counters, over all devices and budgets.
    counts: Option<Arc<Counts>>,
}

impl Context {
    fn counts(&mut self) -> Arc<Counts> {
        let new = || Counts::part_of(&stats::OF_PROCESS);
        self.counts.get_or_insert_with(new).clone()
    }

    fn memory(&mut self, device: DeviceId) -> Arc<MemoryStats> {
        if let Some(memory) = self.counters.iter().find(|x| x.device == device) {
            return memory.clone();
        }
        let thread = self.counts();
        let memory = match &self.in_force {
            Some(account) => account.open_device(device, &thread),
            None => MemoryStats::new(device, &thread, None),
        };
        self.counters.push(memory.clone());
        memory
    }

    /// The account of a budget that is in force now, which may be a new one.
    fn account(&mut self, installed: &Arc<Installed>) -> Arc<Account> {
        let mut accounts = self.accounts.iter();
        if let Some(account) = accounts.find(|it| it.is_of(installed)) {
            return account.clone();
        }
        let account = installed.open();
        self.accounts.push(account.clone());
        account
    }

    /// Puts another budget into force, or none: new tensors get its counters.
    fn change_budget(&mut self, installed: Option<&Arc<Installed>>) {
        self.in_force = installed.map(|installed| self.account(installed));
        let devices = self.in_force.as_ref().map(|account| account.devices());
        self.counters = devices.unwrap_or_default();
        FLAGS.with(|flags| {
            flags.begin(Phase::Forward);
            flags.told.set(Told::NOTHING);
        });
        self.update();
    }

    fn update(&self) {
        FLAGS.with(|flags| {
            let records = !self.is_unrecorded;
            flags.in_scope.set(records && !self.frames.is_empty());
            flags.has_budget.set(records && self.in_force.is_some());
        });
    }
}

/// Why operations are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Recorder {
    /// They are not.
    #[default]
    None,
    /// A scope is open, and no budget in force.
    Scope,
    /// A budget is in force.
    Budget,
}

/// Why operations of this thread are recorded now, if they are: each takes the host longer then.
pub fn recorder() -> Recorder {
    if !records() {
        Recorder::None
    } else if FLAGS.with(|flags| flags.has_budget.get()) {
        Recorder::Budget
    } else {
        Recorder::Scope
    }
}

/// Whether operations of this thread are recorded.
#[inline]
pub(crate) fn records() -> bool {
    FLAGS.with(|flags| {
        if in_force::changes() != flags.known.get() {
            follow();
        }
        flags.in_scope.get() || flags.has_budget.get()
    })
}

/// Runs `work` outside of this thread's scopes and budgets: its operations are not recorded, and
/// what they make is neither evicted nor counted. For tensors of the training that differ between
/// ranks, such as shards of parameters that are read while a step goes on: scopes and budgets then
/// evict the same tensors on all ranks.
///
/// `work` opens no scope, and its operands are of no scope or budget, not delivered, and no
/// parameters of [`checkpoint_units`](crate::checkpoint_units()): such a one would be treated as
/// elsewhere.
pub fn unrecorded<R>(work: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            set_unrecorded(self.0);
        }
    }
    let _restore = Restore(set_unrecorded(true));
    work()
}

/// Returns what was set before.
fn set_unrecorded(is_unrecorded: bool) -> bool {
    CONTEXT.with_borrow_mut(|context| {
        let before = std::mem::replace(&mut context.is_unrecorded, is_unrecorded);
        context.update();
        before
    })
}

/// Looks which budget is in force on this thread, and gives up its accounts of those that are over.
#[cold]
pub(crate) fn follow() {
    let (newest, changes) = Budgets::of_thread().newest();
    FLAGS.with(|flags| flags.known.set(changes));
    // Does nothing while the thread ends.
    let over = CONTEXT.try_with(|context| {
        let mut context = context.borrow_mut();
        let in_force = context.in_force.as_ref();
        let is_in_force = match &newest {
            Some(newest) => in_force.is_some_and(|account| account.is_of(newest)),
            None => in_force.is_none(),
        };
        if !is_in_force {
            context.change_budget(newest.as_ref());
        }
        let is_over = |account: &mut Arc<Account>| account.is_over();
        context.accounts.extract_if(.., is_over).collect::<Vec<_>>()
    });
    // Outside of the borrow.
    drop(over);
}

/// The budgets that this thread has apart from those of the process.
pub(crate) fn own_budgets() -> Option<Arc<Budgets>> {
    let own = CONTEXT.try_with(|context| context.borrow().own_budgets.top().cloned());
    own.ok().flatten()
}

/// Changes whether this thread has budgets of its own.
pub(crate) fn change_own_budgets<R>(change: impl FnOnce(&mut Stack<Arc<Budgets>>) -> R) -> R {
    let changed = CONTEXT.with_borrow_mut(|context| change(&mut context.own_budgets));
    follow();
    changed
}

/// The state of the thread that is needed to record an operation.
pub(crate) struct OpContext {
    /// The number of the operation.
    pub number: u64,
    /// The innermost scope.
    pub region: Option<Arc<Region>>,
    /// Whether the scope's policy is sure to keep the result.
    pub keeps: bool,
    /// Which call of the operation it is in that scope.
    pub call: u32,
    /// Where in a step the thread is, under a budget.
    pub step: Option<Step>,
}

/// Begins an operation.
#[inline]
pub(crate) fn tick(op: &OpInfo) -> OpContext {
    FLAGS.with(|flags| {
        flags.met.set(true);
        let mut tick = OpContext {
            number: flags.tick(),
            region: None,
            keeps: false,
            call: 0,
            step: flags.has_budget.get().then(|| told_step(flags)),
        };
        if flags.in_scope.get() {
            tick.enter(op);
        }
        tick
    })
}

/// Where in a step the thread is. After a backward pass an update begins as it is told.
#[inline]
fn told_step(flags: &Flags) -> Step {
    let step = flags.step.get();
    if step.phase == Phase::Backward && gradient::is_updating() {
        return begin_told_update(flags);
    }
    step
}

#[cold]
fn begin_told_update(flags: &Flags) -> Step {
    let told = flags.told.get();
    flags.told.set(Told {
        update: true,
        ..told
    });
    begin(Phase::Update).unwrap_or(flags.step.get())
}

impl OpContext {
    /// Adds what the innermost scope says of the operation.
    #[inline(never)]
    fn enter(&mut self, op: &OpInfo) {
        if let Some(region) = region() {
            self.keeps = region.policy.keeps(op);
            self.call = region.call(op);
            self.region = Some(region);
        }
    }
}

/// The counters for new tensors on a device.
pub(crate) fn memory_on(device: DeviceId) -> Arc<MemoryStats> {
    CONTEXT.with_borrow_mut(|context| context.memory(device))
}

/// The counters of this thread's new tensors, one entry for each device.
fn counters() -> Vec<Arc<MemoryStats>> {
    CONTEXT.with_borrow(|context| context.counters.clone())
}

/// Begins a forward or backward pass. Returns the thread's new step, `None` without a budget.
pub(crate) fn begin(phase: Phase) -> Option<Step> {
    let account = CONTEXT.with_borrow(|context| context.in_force.clone())?;
    let (before, step) = FLAGS.with(|flags| (flags.begin(phase), flags.step.get()));
    for budget in account.budgets() {
        match (before.phase, phase) {
            (Phase::Forward, Phase::Forward) | (Phase::Update, Phase::Update) => {}
            (_, Phase::Forward) => budget.forward_begins(step),
            (_, Phase::Update) => budget.backward_is_over(step),
            // Also after backward: the forward pass in between was not noticed.
            (_, Phase::Backward) => budget.backward_begins(step),
        }
    }
    Some(step)
}

/// Where in a step the thread is.
pub(crate) fn step() -> Step {
    FLAGS.with(|flags| flags.step.get())
}

/// Notes that the device of a float tensor is read, which may begin an update.
pub(crate) fn reads_device(of: Read) {
    FLAGS.with(|flags| {
        let is_update = flags.reads_device(of) && !flags.told.get().update;
        if is_update && flags.step.get().phase == Phase::Backward {
            begin(Phase::Update);
        }
    });
}

/// Whether a new tensor of so many ones is the seed of a backward pass. In a pass that is told it
/// is the first one, whatever its size; where passes are guessed, a single one that is not made for
/// a gradient.
pub(crate) fn is_seed(elements: u64) -> bool {
    let told = FLAGS.with(|flags| flags.told.get());
    let Some(pass) = gradient::backward_number() else {
        let is_guessed = told.backward.is_none() && elements == 1;
        return is_guessed && !FLAGS.with(Flags::is_at_gradient);
    };
    if told.backward == Some(pass) {
        return false;
    }
    if told.backward.is_none() && step().phase == Phase::Backward {
        take_back_guess();
    }
    let backward = Some(pass);
    FLAGS.with(|flags| flags.told.set(Told { backward, ..told }));
    true
}

/// The first backward pass that is told begins after one was guessed in the same step: the forward
/// pass was still under way.
#[cold]
fn take_back_guess() {
    let forward = Step {
        phase: Phase::Forward,
        ..step()
    };
    FLAGS.with(|flags| flags.step.set(forward));
    let account = in_force();
    let budgets = account.iter().flat_map(|account| account.budgets());
    budgets.for_each(|budget| budget.backward_was_guessed());
}

/// Notes that ones are made, which may be the seed of a backward pass: that ends all units.
#[inline]
pub(crate) fn makes_ones(elements: usize) {
    let told = gradient::backward_number();
    if told.is_none() && elements != 1 {
        return;
    }
    if told.is_some() && FLAGS.with(|flags| flags.seeded.replace(told)) != told {
        units::end_inside_of(0, &[]);
    }
}

/// The number of the last backward pass of this thread whose seed was made, of those that are told.
pub(crate) fn last_told() -> Option<u64> {
    FLAGS.with(|flags| flags.seeded.get())
}

/// Opens a scope, that of a unit if it is given. Returns the number of scopes around it.
pub(crate) fn push(policy: Policy, unit: Option<UnitPass>) -> usize {
    records();
    begin(Phase::Forward);
    CONTEXT.with_borrow_mut(|context| {
        let parent = context.frames.last().map(|frame| frame.region.clone());
        FLAGS.with(|flags| flags.met.set(flags.met.get() && parent.is_some()));
        context.frames.push(Frame {
            region: Arc::new(Region::new(policy, parent, unit)),
            nodes: Vec::new(),
            adopted: Vec::new(),
            sizes: Sizes::default(),
        });
        context.update();
        context.frames.len() - 1
    })
}

/// Adds a tensor to an open scope.
pub(crate) fn enlist_in(region: &Arc<Region>, node: Weak<dyn AnyEntry>, bytes: u64) {
    CONTEXT.with_borrow_mut(|context| {
        let mut frames = context.frames.iter_mut().rev();
        if let Some(frame) = frames.find(|frame| Arc::ptr_eq(&frame.region, region)) {
            frame.nodes.push(node);
            frame.sizes.add(bytes);
        }
    });
}

/// Adds a tensor that the unit before has made to that of the innermost scope.
pub(crate) fn adopt(node: Arc<dyn AnyEntry>) {
    CONTEXT.with_borrow_mut(|context| {
        if let Some(frame) = context.frames.last_mut() {
            frame.adopted.push(Arc::downgrade(&node));
        }
    });
}

/// Closes all scopes inside of so many, without their ends.
pub(crate) fn drop_scopes_inside_of(scopes: usize) {
    let dropped = CONTEXT.with_borrow_mut(|context| {
        let dropped = context.frames.split_off(scopes.min(context.frames.len()));
        context.update();
        dropped
    });
    drop((dropped, take_ended_units(scopes)));
}

/// Whether the innermost scope is that of a unit, inside of so many scopes.
pub(crate) fn is_unit_inside_of(scopes: usize) -> bool {
    CONTEXT.with_borrow(|context| {
        let innermost = context.frames[scopes.min(context.frames.len())..].last();
        innermost.is_some_and(|frame| frame.region.unit.is_some())
    })
}

/// The number of open scopes.
pub(crate) fn open_scopes() -> usize {
    CONTEXT.with_borrow(|context| context.frames.len())
}

/// Keeps the scope of a unit that has ended inside of so many scopes, until its tensors are decided
/// about.
pub(crate) fn wait_ended_unit(frame: Frame, around: usize) {
    CONTEXT.with_borrow_mut(|context| context.ended_units.push(EndedUnit { frame, around }));
}

/// Takes out the scopes of units that have ended inside of so many scopes.
pub(crate) fn take_ended_units(scopes: usize) -> Vec<Frame> {
    let ended = CONTEXT.with_borrow_mut(|context| {
        let is_inside = |ended: &mut EndedUnit| ended.around >= scopes;
        context
            .ended_units
            .extract_if(.., is_inside)
            .collect::<Vec<_>>()
    });
    ended.into_iter().map(|ended| ended.frame).collect()
}

/// Adds a tensor to the innermost scope, if one is open, and the bytes of a storage of its own.
#[inline]
pub(crate) fn enlist(node: Weak<dyn AnyEntry>, bytes: u64) {
    CONTEXT.with_borrow_mut(|context| {
        if let Some(frame) = context.frames.last_mut() {
            frame.nodes.push(node);
            frame.sizes.add(bytes);
        }
    });
}

/// Closes the innermost scope, and returns it.
pub(crate) fn pop() -> Option<Frame> {
    CONTEXT.with_borrow_mut(|context| {
        let closed = context.frames.pop();
        context.update();
        closed
    })
}

/// The innermost scope.
pub(crate) fn region() -> Option<Arc<Region>> {
    CONTEXT.with_borrow(|context| context.frames.last().map(|frame| frame.region.clone()))
}

pub(crate) fn met() -> bool {
    FLAGS.with(|flags| flags.met.get())
}

#[inline]
pub(crate) fn is_collecting() -> bool {
    FLAGS.with(|flags| flags.collects.get())
}

/// Adds a result of the scope that ends; `None` if it is not managed.
pub(crate) fn collect(node: Option<Arc<dyn AnyEntry>>) {
    FLAGS.with(|flags| flags.met.set(true));
    COLLECTED.with_borrow_mut(|collected| collected.get_or_insert_default().extend(node));
}

/// Runs a function that touches results, and returns the nodes of the managed ones.
pub(crate) fn collecting(touch: impl FnOnce()) -> Vec<Arc<dyn AnyEntry>> {
    let _collecting = Raised::new(|flags| &flags.collects);
    let ((), collected) = with_value(&COLLECTED, Vec::new(), touch);
    collected.unwrap_or_default()
}

/// This thread's account of the budget in force.
pub(crate) fn in_force() -> Option<Arc<Account>> {
    records();
    CONTEXT.with_borrow(|context| context.in_force.clone())
}

/// This thread's account of a budget that has been in force on it.
pub(crate) fn account(of: &Arc<Installed>) -> Option<Arc<Account>> {
    records();
    CONTEXT.with_borrow(|context| {
        let mut accounts = context.accounts.iter();
        accounts.find(|it| it.is_of(of)).cloned()
    })
}

fn of_thread() -> Arc<Counts> {
    drops::free();
    CONTEXT.with_borrow_mut(Context::counts)
}

impl RematStats {
    /// The counters of the tensors that this thread made, over all devices and budgets.
    pub fn of_thread() -> Self {
        of_thread().stats()
    }

    /// The counters of the tensors that this thread made on one device under the budget in force,
    /// or without one if there is none.
    pub fn of_device<B: Backend>(device: &B::Device) -> Self {
        records();
        memory_on(device.id()).counts.stats()
    }

    /// The counters of all threads and devices since the process began; the peak is that since any
    /// thread's last [`Self::reset_thread`].
    pub fn of_process() -> Self {
        stats::OF_PROCESS.stats()
    }

    /// Sets this thread's counters to 0 and its peaks, and that of the process, to the live bytes.
    pub fn reset_thread() {
        of_thread().reset();
        stats::OF_PROCESS.reset_peak();
        counters().iter().for_each(|memory| memory.counts.reset());
    }
}
