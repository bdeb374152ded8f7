//! Scopes that begin and end by themselves: those of the repeated blocks of a model whose code
//! cannot be edited.
//!
//! Each parameter of the model refers to its *unit*, the block that it is in. The first operation
//! of a forward pass that uses a parameter of a unit begins the unit's scope, and the first that
//! uses a parameter of anything else ends it, as does the backward pass.
//!
//! What a unit hands to the rest of the model is not returned by any function here: it is what
//! operations outside of its scope use in forward passes. A unit whose operations ran before, such
//! as the block before in the same model, is expected to hand over the results of the same
//! operations. The first one of its kind waits until the next unit has ended, to learn which they
//! are, and so does one of which something else is used.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use burn_backend::Backend;
use burn_decorator::gradient;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use crate::host::request::Named;
use crate::node::entry::AnyEntry;
use crate::node::handle::Handle;
use crate::node::kind::Float;
use crate::observe::trace::{self, EventKind};
use crate::record::context::{self, Frame};
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::scope::checkpoint;
use crate::scope::policy::Policy;
use crate::scope::region::Region;

/// Whether any parameter of the process has a unit. Read first, for each operation.
static EVER: AtomicBool = AtomicBool::new(false);

/// At most so many operations are examined to find out whether a tensor is cheap to compute again.
const MOST_EXAMINED: usize = 64;

/// A model whose units always run other operations, such as loops over sequences of other lengths,
/// is not remembered without end.
const MOST_PROGRAMS: usize = 1024;

/// Of the number of an operation of the unit before, whose result this unit has taken over: there
/// are fewer operations in a unit.
const ADOPTED: u32 = 1 << 31;

/// Whether any parameter of the process has a unit.
#[inline]
pub(crate) fn exist() -> bool {
    EVER.load(Ordering::Relaxed)
}

/// What parameters are together in: a repeated block, or everything that is in none.
pub(crate) struct Unit {
    /// Empty for that of everything else, which has no scope.
    path: String,
    programs: Arc<Programs>,
}

/// What units hand over, by their operations.
#[derive(Default)]
pub(crate) struct Programs(Mutex<FxHashMap<Program, HandedOver>>);

/// The operations of a unit. Each thread learns by itself: what a thread evicts must not depend on
/// how far another is, because ranks that are threads gather parameters as they use them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Program {
    thread: ThreadId,
    /// A hash of the operations.
    operations: u64,
}

/// What a unit hands over, as numbers of operations: of its own, from 1; of the unit before, whose
/// results it has [adopted]; 0 for all scopes inside of it.
#[derive(Clone, Default)]
struct HandedOver {
    /// Their results are used after the unit.
    used: FxHashSet<u32>,
    /// The last operations, which compute something that is used after the unit from another such
    /// result, and without a product. They are taken for the first operations of the next unit,
    /// before it uses a parameter, such as the statistics of its norm.
    of_next: FxHashSet<u32>,
}

impl fmt::Debug for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Unit").field(&self.path).finish()
    }
}

impl Unit {
    pub fn new(path: String, programs: Arc<Programs>) -> Arc<Self> {
        EVER.store(true, Ordering::Relaxed);
        Arc::new(Self { path, programs })
    }

    pub fn name(&self) -> &str {
        &self.path
    }
}

/// The forward pass of a unit, as its region knows it.
pub(crate) struct UnitPass {
    unit: Arc<Unit>,
    /// The thread that runs it.
    thread: ThreadId,
    /// The number of operations so far.
    operations: AtomicU32,
    /// A hash of them.
    program: AtomicU64,
    /// Whether the unit's scope has ended.
    is_over: AtomicBool,
    /// Whether it was decided which of its tensors stay.
    is_decided: AtomicBool,
    /// The operations whose results were used outside.
    used_outside: Mutex<FxHashSet<u32>>,
}

impl UnitPass {
    fn new(unit: Arc<Unit>) -> Self {
        Self {
            unit,
            thread: thread::current().id(),
            operations: AtomicU32::new(0),
            program: AtomicU64::new(0),
            is_over: AtomicBool::new(false),
            is_decided: AtomicBool::new(false),
            used_outside: Mutex::default(),
        }
    }

    /// Counts an operation of the unit. Returns its number, from 1: a result of a scope inside of
    /// the unit has none.
    pub fn count(&self, op: &OpInfo) -> u32 {
        let before = self.program.load(Ordering::Relaxed);
        let program = (before.rotate_left(5) ^ op.key).wrapping_mul(0x517c_c1b7_2722_0a95);
        self.program.store(program, Ordering::Relaxed);
        self.operations.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Notes a use of the result of one of its operations.
    #[inline]
    pub fn note_use(&self, operation: u32) {
        if self.is_over.load(Ordering::Relaxed) {
            self.note_use_outside(operation);
        }
    }

    #[cold]
    fn note_use_outside(&self, operation: u32) {
        if gradient::pass().is_some() {
            return;
        }
        if !self.is_decided.load(Ordering::Relaxed) {
            self.used_outside.lock().insert(operation);
            return;
        }
        // It was evicted, and is computed again now: the next unit of this kind keeps it.
        let mut programs = self.unit.programs.0.lock();
        if let Some(known) = programs.get_mut(&self.program()) {
            known.used.insert(operation);
        }
    }

    fn program(&self) -> Program {
        Program {
            thread: self.thread,
            operations: self.program.load(Ordering::Relaxed),
        }
    }

    fn known(&self) -> Option<HandedOver> {
        self.unit.programs.0.lock().get(&self.program()).cloned()
    }

    /// Whether all that was used of it is known to be handed over.
    fn is_known(&self) -> bool {
        let known = self.known();
        known.is_some_and(|known| self.used_outside.lock().is_subset(&known.used))
    }
}

/// The number of an operation for the unit that takes over its result.
pub(crate) fn adopted(operation: u32) -> u32 {
    operation | ADOPTED
}

fn is_adopted(operation: u32) -> bool {
    operation & ADOPTED != 0
}

/// In an update, a tensor that is selected from two versions of a parameter of a unit: what the
/// parameter is called, and its unit.
pub(crate) fn version_of_both<B: Backend>(
    x: &Handle<B, Float>,
    y: &Handle<B, Float>,
) -> Option<Named> {
    if !gradient::is_updating() || x.is_delivered() {
        return None;
    }
    let (named, other) = (x.named()?, y.unit()?);
    let is_same = named
        .unit
        .as_ref()
        .is_some_and(|unit| Arc::ptr_eq(unit, &other));
    is_same.then_some(named)
}

/// An operation that uses a parameter of another unit than the one before. When it is over, what
/// the ended units leave is evicted: its operands may be among it.
pub(crate) struct Reached {
    /// The number of scopes around the unit that has ended.
    around: usize,
}

/// The next operation uses a parameter of this unit. Returns a guard if the scope of another one
/// has ended by that.
#[inline(never)]
pub(crate) fn reach(unit: &Arc<Unit>) -> Option<Reached> {
    if gradient::pass().is_some() {
        return None;
    }
    let innermost = context::region();
    let mut around = std::iter::successors(innermost.as_ref(), |region| region.parent.as_ref());
    // A scope that the unit's own code has opened evicts what is made in it.
    let is_open = around
        .find_map(|region| region.unit.as_ref())
        .is_some_and(|pass| Arc::ptr_eq(&pass.unit, unit));
    if is_open {
        return None;
    }
    let reached = innermost
        .is_some_and(|region| region.unit.is_some())
        .then(|| Reached { around: close() });
    if !unit.path.is_empty() {
        if trace::is_on() {
            let label = unit.path.clone();
            trace::emit(EventKind::ScopeBegin { label }, 0, 0, None);
        }
        context::push(Policy::Recompute, Some(UnitPass::new(unit.clone())));
    }
    reached
}

impl Drop for Reached {
    fn drop(&mut self) {
        if !thread::panicking() {
            self.decide();
        }
    }
}

impl Reached {
    /// Decides about the tensors of units that have ended. The last one waits if it is the first of
    /// its kind, or hands over more than those before.
    fn decide(&self) {
        let mut frames = context::take_ended_units(self.around);
        let Some(last) = frames.pop() else {
            return;
        };
        for frame in frames {
            learn(&frame);
            end(frame, false);
        }
        if last.region.unit.as_ref().is_some_and(UnitPass::is_known) {
            end(last, true);
        } else {
            context::wait_ended_unit(last, self.around);
        }
    }
}

/// Closes the scope of the innermost unit, whose tensors wait to be decided about. Returns the
/// number of scopes around it.
fn close() -> usize {
    let closed = context::pop();
    let around = context::open_scopes();
    if let Some(frame) = closed {
        if let Some(pass) = &frame.region.unit {
            pass.is_over.store(true, Ordering::Relaxed);
        }
        if trace::is_on() {
            trace::emit(EventKind::ScopeEnd, 0, 0, None);
        }
        context::wait_ended_unit(frame, around);
    }
    around
}

/// Ends the scopes of all units of this thread that are inside of so many open scopes, and decides
/// about the tensors of all that have ended there: of a forward pass nothing uses them any more but
/// `results`, those of the scope around them.
pub(crate) fn end_inside_of(scopes: usize, results: &[Arc<dyn AnyEntry>]) {
    if !exist() {
        return;
    }
    while context::is_unit_inside_of(scopes) {
        close();
    }
    for frame in context::take_ended_units(scopes) {
        if let Some(pass) = &frame.region.unit {
            let own = results
                .iter()
                .filter(|node| node.is_of_region(&frame.region));
            let operations: Vec<_> = own.map(|node| node.info().operation).collect();
            pass.used_outside.lock().extend(operations);
        }
        learn(&frame);
        end(frame, false);
    }
}

/// Learns what a unit hands over, if it is more than is known of its kind.
fn learn(frame: &Frame) {
    let Some(pass) = &frame.region.unit else {
        return;
    };
    if pass.is_known() {
        return;
    }
    let mut used = pass.known().unwrap_or_default().used;
    used.extend(&*pass.used_outside.lock());
    let nodes = frame.nodes.iter().chain(&frame.adopted);
    let handed_over: Vec<_> = nodes
        .filter_map(Weak::upgrade)
        .filter(|node| node.is_of_region(&frame.region))
        .filter(|node| used.contains(&node.info().operation))
        .collect();
    let mut of_next = FxHashSet::default();
    for node in &handed_over {
        if let Some(operations) = cheap_operations(node, &handed_over, &frame.region) {
            of_next.extend(operations);
        }
    }
    // Something has to stay from which the rest is computed.
    if used.is_subset(&of_next) {
        of_next.clear();
    }
    let learned = HandedOver { used, of_next };
    let mut programs = pass.unit.programs.0.lock();
    let program = pass.program();
    let is_own = |other: &Program| other.thread == program.thread;
    if programs.keys().filter(|other| is_own(other)).count() >= MOST_PROGRAMS {
        programs.retain(|other, _| !is_own(other));
    }
    programs.insert(program, learned);
}

/// The operations by which a tensor of a unit is computed from others that the unit hands over, and
/// from what was there before the unit; `None` if a product is among them, the result of a scope
/// inside of it, or what it has adopted.
fn cheap_operations(
    node: &Arc<dyn AnyEntry>,
    handed_over: &[Arc<dyn AnyEntry>],
    region: &Arc<Region>,
) -> Option<Vec<u32>> {
    let is_start = |input: &Arc<dyn AnyEntry>| {
        let is_handed_over = handed_over.iter().any(|other| Arc::ptr_eq(other, input));
        let is_own = !is_adopted(input.info().operation);
        is_handed_over && is_own || !input.is_of_region(region)
    };
    let mut operations = Vec::new();
    let mut stack = vec![node.clone()];
    while let Some(node) = stack.pop() {
        let info = node.info();
        operations.push(info.operation);
        let is_own = info.operation != 0 && !is_adopted(info.operation);
        let is_cheap = is_own && info.op.work != Work::Compute;
        if !is_cheap || operations.len() > MOST_EXAMINED {
            return None;
        }
        let inputs = node.inputs().into_iter();
        stack.extend(inputs.filter(|input| !is_start(input)));
    }
    Some(operations)
}

/// Ends a unit: what it hands over stays, or is taken over by the next unit, whose scope is open if
/// `is_followed`; the rest is evicted. Where no unit follows, and where nothing holds the tensors
/// from which the next unit would compute again what it takes over, all that is used stays.
fn end(mut frame: Frame, is_followed: bool) {
    let Some(pass) = &frame.region.unit else {
        return;
    };
    pass.is_decided.store(true, Ordering::Relaxed);
    let HandedOver { used, of_next } = pass.known().unwrap_or_default();
    frame.nodes.append(&mut frame.adopted);
    let alive = frame.nodes.iter().filter_map(Weak::upgrade);
    let own: Vec<_> = alive
        .filter(|node| node.is_of_region(&frame.region))
        .map(|node| (node.info(), node))
        .collect();
    let is_held = |operation: &u32| {
        let mut own = own.iter();
        own.any(|(info, _)| info.operation == *operation && info.users > 0)
    };
    let next = context::region().filter(|next| is_followed && next.unit.is_some());
    let mut starts = used
        .difference(&of_next)
        .filter(|operation| !is_adopted(**operation));
    let next = next.filter(|_| starts.all(is_held));
    let mut stay = Vec::new();
    for (info, node) in own {
        if let Some(next) = &next
            && of_next.contains(&info.operation)
        {
            node.move_to(next);
            let is_other =
                |other: &Weak<dyn AnyEntry>| !Weak::ptr_eq(other, &Arc::downgrade(&node));
            frame.nodes.retain(is_other);
            context::adopt(node);
        } else if info.users > 0 && used.contains(&info.operation) {
            stay.push(node);
        }
    }
    checkpoint::end(frame, stay);
}
