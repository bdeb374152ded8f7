//! Bringing tensors back: from their host copy, or by a replay.
//!
//! A replay first plans, without recursion, what has to run, in which order, and how often each
//! result is needed. Then it runs, and drops what no handle refers to right after its last use.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn_backend::Backend;
use rustc_hash::FxHashMap;

use crate::budget::again::again;
use crate::error::RematError;
use crate::host::request::DELIVERED;
use crate::node::Node;
use crate::node::content::{Content, State};
use crate::node::entry::AnyEntry;
use crate::node::recipe::Recipe;
use crate::observe::stats::RematStats;
use crate::observe::trace::{self, EventKind};
use crate::record::flags::{FLAGS, Raised};
use crate::scope::region::Region;

/// Brings nodes back, with what they need.
pub(crate) fn bring_back<B: Backend>(targets: impl IntoIterator<Item = Arc<Node<B>>>) {
    let _replaying = Raised::new(|flags| &flags.replays);
    for target in targets {
        if !fetch(&target) {
            Plan::new(target).run();
        }
    }
}

/// Whether the operations that this thread gives to the backend below [`Remat`](crate::Remat) bring
/// evicted tensors back, by a replay or an upload. For backends that tell forward from backward by
/// the operations they get.
pub fn is_replaying() -> bool {
    FLAGS.with(|flags| flags.replays.get())
}

/// Nodes whose storages stay until this is dropped.
#[derive(Default)]
pub(crate) struct Locked<B: Backend>(Vec<Arc<Node<B>>>);

impl<B: Backend> Locked<B> {
    /// Locks a node. Its storage need not be there yet.
    pub fn add(&mut self, node: &Arc<Node<B>>, state: &mut State<B>) {
        state.locks += 1;
        self.0.push(node.clone());
    }
}

impl<B: Backend> Drop for Locked<B> {
    fn drop(&mut self) {
        while let Some(node) = self.0.pop() {
            let mut state = node.state();
            state.locks -= 1;
            let is_used = node.users() > 0 && !node.meta.is_delivered;
            let vacated = if is_used || node.is_branch_point() {
                None
            } else {
                node.vacate(&mut state)
            };
            drop(state);
            node.release(vacated);
        }
    }
}

/// Brings the inputs of a recipe back.
pub(crate) fn lock_inputs<B: Backend>(recipe: &dyn Recipe<B>) -> Locked<B> {
    let mut locked = Locked::default();
    recipe.inputs(&mut |source| locked.add(source.node(), &mut source.node().state()));
    bring_back(locked.0.iter().cloned());
    locked
}

/// Brings a node back that is in host memory, and uploads ahead what backward will use next.
/// Returns whether the node is resident.
pub(crate) fn fetch<B: Backend>(node: &Arc<Node<B>>) -> bool {
    let (meta, memory) = (&node.meta, node.memory());
    let ahead = match &node.state().content {
        Content::Hosted { value: None, copy } => copy.ahead.is_some(),
        content => return content.is_resident(),
    };
    if !ahead {
        memory.make_room(meta.op.name, node.bytes());
    }
    let mut state = node.state();
    let Content::Hosted { value: None, copy } = &mut state.content else {
        return state.content.is_resident();
    };
    let ahead = copy.ahead.is_some();
    let value = match copy.tensor(&meta.device) {
        Ok(value) => value,
        Err(reason) => {
            drop(state);
            let (result, reason) = (meta.result(), reason.to_string());
            panic!("{}", RematError::HostCopyLost { result, reason });
        }
    };
    let unneeded = match &mut state.content {
        // The copy is kept: the budget may evict the tensor again.
        Content::Hosted { value: slot, .. } if memory.may_evict() => {
            *slot = Some(value);
            None
        }
        content => Some(std::mem::replace(content, Content::Kept(value))),
    };
    if !ahead {
        node.counted().add();
    }
    drop(state);
    drop(unneeded);
    node.was_restored();
    if !ahead {
        node.uploaded();
    }
    if let Some(budget) = node.budget() {
        // Nothing is uploaded ahead under a budget: what it evicts would depend on when copies
        // arrive.
        memory.prefetch.forget(meta.id);
        budget.list(node);
    } else {
        memory.prefetch.asked_for(meta.id);
    }
    true
}

/// Locks a node for a replay, and returns its recipe unless it is resident: in one step, because
/// another thread may drop its last handle in between.
fn lock<B: Backend>(node: &Arc<Node<B>>) -> Option<Arc<dyn Recipe<B>>> {
    loop {
        let mut state = node.state();
        if !state.content.is_on_host() {
            state.locks += 1;
            let recipe = state.content.recipe();
            return recipe.filter(|_| state.content.is_evicted()).cloned();
        }
        drop(state);
        fetch(node);
    }
}

struct Planned<B: Backend> {
    node: Arc<Node<B>>,
    /// How many inputs of steps to come refer to it.
    uses: u32,
    /// Whether it was resident before; `None` until it is locked.
    found: Option<bool>,
}

/// A plan has room for so many nodes without further allocations.
const USUAL: usize = 28;

/// What brings a node back.
struct Run<B: Backend> {
    recipe: Arc<dyn Recipe<B>>,
    /// The part of [`Plan::inputs`] that has the indices of its inputs.
    inputs: Range<usize>,
}

/// A node to run.
struct Ordered<B: Backend> {
    /// Its index among [`Plan::nodes`].
    index: usize,
    run: Run<B>,
}

/// A node to visit, once more with what brings it back when its inputs are in the order.
struct Visit<B: Backend> {
    /// As [`Ordered::index`].
    index: usize,
    run: Option<Run<B>>,
}

impl<B: Backend> Visit<B> {
    fn first(index: usize) -> Self {
        Self { index, run: None }
    }
}

/// The indices of nodes among [`Plan::nodes`].
struct Indices<B: Backend>(FxHashMap<*const Node<B>, usize>);

impl<B: Backend> Indices<B> {
    fn new() -> Self {
        Self(FxHashMap::with_capacity_and_hasher(
            USUAL,
            Default::default(),
        ))
    }

    /// The index of a node that is needed for so many more uses. Adds it to `nodes` if it is new.
    fn need(
        &mut self,
        nodes: &mut Vec<Option<Planned<B>>>,
        node: &Arc<Node<B>>,
        uses: u32,
    ) -> usize {
        let index = *self.0.entry(Arc::as_ptr(node)).or_insert(nodes.len());
        if index == nodes.len() {
            nodes.push(Some(Planned {
                node: node.clone(),
                uses,
                found: None,
            }));
        } else if let Some(planned) = &mut nodes[index] {
            planned.uses += uses;
        }
        index
    }
}

struct Plan<B: Backend> {
    start: Instant,
    target: Arc<Node<B>>,
    /// The target's scope.
    region: Option<Arc<Region>>,
    /// Everything that is locked, results and resident inputs; `None` after its last use.
    nodes: Vec<Option<Planned<B>>>,
    /// Indices of nodes.
    inputs: Vec<usize>,
    /// The nodes to run, inputs first.
    order: Vec<Ordered<B>>,
    /// What came back, counted when the plan is dropped.
    replayed: RematStats,
}

impl<B: Backend> Plan<B> {
    fn new(target: Arc<Node<B>>) -> Self {
        let region = target.state().home.region().cloned();
        let mut plan = Self {
            start: Instant::now(),
            target,
            region,
            nodes: Vec::with_capacity(USUAL),
            inputs: Vec::with_capacity(USUAL),
            order: Vec::with_capacity(USUAL),
            replayed: RematStats::default(),
        };
        let mut indices = Indices::new();
        let mut siblings = Vec::new();
        let mut stack = Vec::with_capacity(USUAL);
        let first = indices.need(&mut plan.nodes, &plan.target, 1);
        stack.push(Visit::first(first));
        while let Some(Visit { index, run }) = stack.pop() {
            if let Some(run) = run {
                plan.order.push(Ordered { index, run });
                continue;
            }
            let planned = plan.nodes[index].as_mut();
            let Some(planned) = planned.filter(|node| node.found.is_none()) else {
                continue;
            };
            // Not locked if the upload of its host copy panics.
            let recipe = lock(&planned.node);
            planned.found = Some(recipe.is_none());
            let Some(recipe) = recipe else {
                continue;
            };
            let begin = plan.inputs.len();
            recipe.inputs(&mut |source| {
                let input = indices.need(&mut plan.nodes, source.node(), 1);
                plan.inputs.push(input);
            });
            let inputs = begin..plan.inputs.len();
            // An operation that runs for one of its results returns the others too: those that stay
            // are stored.
            recipe.siblings(&mut |sibling| {
                let state = sibling.state();
                let evicted = state.content.is_evicted();
                let has_users = sibling.users() > 0;
                if evicted && has_users && plan.is_kept(&sibling, &state) {
                    let sibling = indices.need(&mut plan.nodes, &sibling, 0);
                    siblings.push(Visit::first(sibling));
                }
            });
            let run = Some(Run {
                recipe,
                inputs: inputs.clone(),
            });
            stack.push(Visit { index, run });
            stack.extend(plan.inputs[inputs].iter().copied().map(Visit::first));
            stack.append(&mut siblings);
        }
        plan
    }

    fn run(mut self) {
        for Ordered { index, run } in std::mem::take(&mut self.order) {
            let Run { recipe, inputs } = run;
            let Some(Planned { node, .. }) = &self.nodes[index] else {
                continue;
            };
            let memory = node.memory();
            if !memory.retries() {
                self.lend(inputs.clone());
            }
            let is_of_target = Arc::ptr_eq(memory, self.target.memory());
            step(node, &*recipe, is_of_target.then_some(&mut self.replayed));
            // A tensor that came back and stays no longer needs its recipe, unless a budget may
            // evict it again.
            if !memory.may_evict() && self.is_kept(node, &node.state()) {
                node.settle();
            }
            drop(recipe);
            self.release(inputs);
        }
    }

    /// Allows inputs that have no other use to be written into.
    fn lend(&self, inputs: Range<usize>) {
        for input in &self.inputs[inputs] {
            if let Some(Planned { node, uses: 1, .. }) = &self.nodes[*input]
                && node.users() == 0
            {
                let mut state = node.state();
                let is_only_use = state.locks == 1 && !node.is_branch_point();
                if let Content::Recorded(recorded) = &mut state.content {
                    recorded.hand_over = is_only_use;
                }
            }
        }
    }

    /// One use of each input is over.
    fn release(&mut self, inputs: Range<usize>) {
        for input in inputs {
            let last = self.nodes[self.inputs[input]].take_if(|planned| {
                planned.uses -= 1;
                planned.uses == 0
            });
            if let Some(planned) = last {
                self.unlock(&planned);
            }
        }
    }

    /// Whether a node that came back stays: it has handles or an inner scope starts from it, and
    /// its scope is the target's or around it.
    fn is_kept(&self, node: &Arc<Node<B>>, state: &State<B>) -> bool {
        if Arc::ptr_eq(node, &self.target) {
            return true;
        }
        let is_needed = node.users() > 0 || state.feeds_inner_scope || node.is_branch_point();
        if !is_needed || node.meta.is_delivered {
            return false;
        }
        let target = self.region.as_ref();
        let is_around = |region| target.is_some_and(|own| own.is_within(region));
        state.home.region().is_none_or(is_around)
    }

    fn unlock(&self, planned: &Planned<B>) {
        let (node, Some(found)) = (&planned.node, planned.found) else {
            return;
        };
        let mut state = node.state();
        let is_kept = if found {
            node.users() > 0 || node.is_branch_point()
        } else {
            self.is_kept(node, &state)
        };
        state.locks -= 1;
        if let Content::Recorded(recorded) = &mut state.content {
            recorded.hand_over = false;
        }
        let vacated = if is_kept {
            None
        } else {
            node.vacate(&mut state)
        };
        drop(state);
        node.release(vacated);
    }
}

/// Runs one recipe and stores its result. Counts it in `replayed`, or without that in the node's
/// own counters.
fn step<B: Backend>(
    node: &Arc<Node<B>>,
    recipe: &dyn Recipe<B>,
    replayed: Option<&mut RematStats>,
) {
    let meta = &node.meta;
    // One of several results is there already: room for all was made before the operation ran.
    if recipe.computes() {
        let own = node.budgeted.as_ref();
        let bytes = node.own_bytes() + own.map_or(0, |own| own.parts_bytes);
        node.memory().make_room(meta.op.name, bytes);
    }
    let start = trace::is_on().then(Instant::now);
    let value = again(node.memory(), meta.op, || recipe.run());
    let time = start.map_or(Duration::ZERO, |start| start.elapsed());
    let mut state = node.state();
    // Another thread has brought it back meanwhile.
    if state.content.is_resident() {
        return;
    }
    state.content.came_back(value);
    node.counted().add();
    drop(state);
    node.was_restored();
    let budget = node.budget();
    if let Some(budget) = budget {
        budget.list(node);
    }
    if *meta.op == DELIVERED {
        return node.uploaded();
    }
    if let (Some(budget), Some(own)) = (budget, &node.budgeted) {
        budget.thrashing.replayed(own.cost_ns);
    }
    let bytes = node.bytes();
    node.emit(|traced| EventKind::Replay(traced, time), bytes);
    let count = |stats: &mut RematStats| {
        stats.replayed_bytes += bytes;
        stats.replayed_operations += u64::from(recipe.computes());
    };
    match replayed {
        Some(replayed) => count(replayed),
        // On another device than the target, or made by another thread.
        None => node.memory().counts.count(|stats| {
            count(stats);
            stats.replay_time += time;
        }),
    }
}

/// Unlocks all nodes, also when a recipe panics, and counts what came back.
impl<B: Backend> Drop for Plan<B> {
    fn drop(&mut self) {
        for planned in std::mem::take(&mut self.nodes).iter().flatten() {
            self.unlock(planned);
        }
        if self.replayed != RematStats::default() {
            self.replayed.replay_time = self.start.elapsed();
            let counts = &self.target.memory().counts;
            counts.count(|stats| *stats = *stats + self.replayed);
        }
    }
}
