//! Making room on a device.

use std::cmp::Ordering as Order;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn_backend::Backend;
use parking_lot::Mutex;
use rustc_hash::FxHashMap;

use super::Neighbours;
use super::candidates::Candidates;
use super::need::{Need, Needs};
use super::score::Group;
use super::thrashing::Thrashing;
use super::{Expected, Limit, MemoryBudget, Overflow};
use crate::context;
use crate::error::size;
use crate::ledger::Ledger;
use crate::node::{AnyEntry, Entry, Facts, Lineage};
use crate::stats::RematStats;
use crate::verify;

/// What a pass frees beyond what is asked for, as a part of the limit: a pass looks at everything, so it should not be needed
/// at every operation.
const AHEAD: u64 = 64;

/// The same where a pass looks at one part of many, of its share of the limit: small parts know little of what is cheapest,
/// large ones take long.
const AHEAD_OF_PART: u64 = 16;

/// The sizes of so many results are remembered: some 100 KiB.
const EXPECTED: usize = 8192;

/// Bytes of an f64.
const LARGEST_ELEMENT_BYTES: u64 = 8;

/// The budget of one device.
pub(crate) struct Budget {
    settings: MemoryBudget,
    /// `u64::MAX` while it is measured.
    limit: AtomicU64,
    /// Whether the step under way had its backward pass.
    differentiated: AtomicBool,
    live: AtomicU64,
    peak: AtomicU64,
    /// Bytes that were live when nothing more could be evicted.
    stuck: AtomicU64,
    nodes: Mutex<Nodes>,
    thrashing: Thrashing,
    pub neighbours: Neighbours,
    needs: Needs,
    expected: Mutex<FxHashMap<Expected, u64>>,
}

/// The nodes that a budget knows.
#[derive(Default)]
struct Nodes {
    all: Vec<Weak<dyn AnyEntry>>,
    candidates: Candidates,
    /// How many there may be before those that are gone are forgotten.
    tidy_at: usize,
}

impl Nodes {
    fn remember(&mut self, node: Weak<dyn AnyEntry>) {
        self.all.push(node);
        if self.all.len() > self.tidy_at {
            self.all.retain(|node| node.strong_count() > 0);
            self.tidy_at = self.all.len() * 3 / 2 + 64;
        }
    }
}

impl Budget {
    pub fn new(settings: MemoryBudget) -> Self {
        let limit = match settings.limit {
            Limit::Bytes(bytes) => bytes,
            Limit::Fraction(_) => u64::MAX,
        };
        Self {
            settings,
            limit: AtomicU64::new(limit),
            differentiated: AtomicBool::new(false),
            live: AtomicU64::new(0),
            peak: AtomicU64::new(0),
            stuck: AtomicU64::new(u64::MAX),
            nodes: Mutex::default(),
            thrashing: Thrashing::default(),
            neighbours: Neighbours::default(),
            needs: Needs::default(),
            expected: Mutex::default(),
        }
    }

    /// Whether there is a limit, or will be.
    pub fn may_evict(&self) -> bool {
        self.settings.limit != Limit::Bytes(u64::MAX)
    }

    pub fn live(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }

    pub fn peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }

    /// The limit; `None` while it is measured.
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit < u64::MAX)
    }

    /// Whether what several recipes start from is kept without handles: in forward, once there is a limit.
    pub fn keeps_junctions(&self) -> bool {
        !self.differentiated.load(Ordering::Relaxed) && self.limit().is_some()
    }

    pub fn add(&self, bytes: u64) {
        let live = self.live.fetch_add(bytes, Ordering::Relaxed) + bytes;
        if live > self.peak.load(Ordering::Relaxed) {
            self.peak.fetch_max(live, Ordering::Relaxed);
        }
    }

    /// As [`Self::add`], of what the peak does not show.
    pub fn add_unseen(&self, bytes: u64) {
        self.live.fetch_add(bytes, Ordering::Relaxed);
    }

    pub fn remove(&self, bytes: u64) {
        let live = self.live.fetch_sub(bytes, Ordering::Relaxed);
        let live = live.saturating_sub(bytes);
        if live < self.stuck.load(Ordering::Relaxed) {
            // What comes instead may be evicted.
            self.stuck.store(u64::MAX, Ordering::Relaxed);
        }
    }

    /// Counts work that was done once more.
    pub fn replayed(&self, cost_ns: f32) {
        self.thrashing.replayed(cost_ns);
    }

    /// Counts work.
    pub fn computed(&self, cost_ns: f32) {
        self.thrashing.computed(cost_ns);
    }

    /// Remembers the size of an operation's result.
    pub fn expect(&self, key: Expected, bytes: u64) {
        let mut expected = self.expected.lock();
        if expected.len() >= EXPECTED {
            // Shapes vary: those of steps to come are other ones.
            expected.clear();
        }
        expected.insert(key, bytes);
    }

    /// The size of an operation's result as it was last time.
    pub fn expected(&self, key: Expected) -> Option<u64> {
        self.expected.lock().get(&key).copied()
    }

    /// What the search for tensors to evict took and how many steps thrashed; all else is 0.
    pub fn stats(&self) -> RematStats {
        let (searched_tensors, search_time) = self.thrashing.search();
        RematStats {
            searched_tensors,
            search_time,
            thrashing_steps: self.thrashing.steps(),
            ..RematStats::ZERO
        }
    }

    pub fn reset_stats(&self) {
        self.thrashing.reset();
    }

    /// Takes a new node into consideration.
    pub fn register<B: Backend>(&self, node: &Arc<dyn Entry<B>>) {
        let head = node.head();
        let weak: Weak<dyn Entry<B>> = Arc::downgrade(node);
        let mut nodes = self.nodes.lock();
        if !head.listed.swap(true, Ordering::Relaxed) {
            nodes.candidates.add(head.owner().id, weak.clone());
        }
        nodes.remember(weak);
    }

    /// Takes a node that is resident to be one that may be evicted.
    pub fn list<B: Backend>(&self, node: &Arc<dyn Entry<B>>) {
        let head = node.head();
        self.neighbours.came_back(&head.place);
        if !head.listed.swap(true, Ordering::Relaxed) {
            let weak: Weak<dyn Entry<B>> = Arc::downgrade(node);
            self.nodes.lock().candidates.add(head.owner().id, weak);
        }
    }

    /// A limit that is measured is known once the first step is over: what it took at most, gradients included.
    fn measured(&self) {
        if let Limit::Fraction(fraction) = self.settings.limit
            && self.limit().is_none()
        {
            let limit = (self.peak() as f64 * fraction) as u64;
            self.limit.store(limit, Ordering::Relaxed);
            let need = self.needs.largest();
            if self.settings.overflow == Overflow::Panic && need.bytes() > limit {
                panic!("{}", need.error(limit));
            }
        }
    }

    /// A backward pass begins.
    pub fn backward_begins(&self) {
        if self.differentiated.swap(true, Ordering::Relaxed) {
            // Where no begin of a forward pass was noticed, the step before ends here.
            self.measured();
            self.step_is_over();
        }
        self.settle_scalars();
    }

    /// What the budget did to a step is known.
    pub fn step_is_over(&self) {
        self.neighbours.forget();
        self.thrashing.judge(self.limit());
        if let Some(limit) = self.limit() {
            self.needs.say(limit);
        }
    }

    fn ends_step(&self) {
        if self.differentiated.swap(false, Ordering::Relaxed) {
            self.measured();
        }
        self.step_is_over();
    }

    /// Drops the recipes of single numbers: a loss that the training loop holds would keep the whole forward pass.
    fn settle_scalars(&self) {
        for node in self.alive() {
            let facts = node.facts();
            if facts.bytes <= LARGEST_ELEMENT_BYTES && facts.users > 0 {
                node.settle();
            }
        }
    }

    /// What descends from gradients and is alive is state: it is counted no more.
    pub fn forward_begins(&self) {
        self.ends_step();
        for node in self.alive() {
            if node.facts().lineage == Lineage::Gradient {
                node.retire();
            }
        }
    }

    /// Whatever is alive is state.
    pub fn step_ends(&self) {
        self.ends_step();
        for node in self.alive() {
            node.settle();
            node.retire();
        }
    }

    fn alive(&self) -> Vec<Arc<dyn AnyEntry>> {
        let nodes = self.nodes.lock();
        nodes.all.iter().filter_map(Weak::upgrade).collect()
    }

    /// Evicts until `bytes` more fit.
    #[inline]
    pub fn make_room(&self, op: &'static str, bytes: u64) {
        let limit = self.limit.load(Ordering::Relaxed);
        if self.live().saturating_add(bytes) > limit {
            self.evict_for(op, bytes, limit);
        } else if limit == u64::MAX && self.needs.is_time() {
            self.look(op, bytes);
        }
    }

    /// Looks at what an unconstrained step needs, if its limit is being measured.
    #[cold]
    fn look(&self, op: &'static str, bytes: u64) {
        if matches!(self.settings.limit, Limit::Fraction(_)) {
            self.needs.look(&self.alive(), context::clock(), op, bytes);
        }
    }

    #[cold]
    fn evict_for(&self, op: &'static str, bytes: u64, limit: u64) {
        // Where nothing can be evicted, looking again is worth it only after something has changed.
        let stuck = self.stuck.load(Ordering::Relaxed);
        let little = self.live().saturating_sub(stuck) <= stuck / AHEAD && self.live() >= stuck;
        // Unless it would be said that more is needed than was known, or the operation is refused.
        let known = !self.needs.is_clearly_larger(self.live() + bytes);
        if little && known && self.settings.overflow == Overflow::Warn {
            return;
        }
        self.stuck.store(u64::MAX, Ordering::Relaxed);
        let start = Instant::now();
        let (evicted, searched) = self.evict(bytes, limit);
        self.thrashing.searched(searched, start.elapsed(), limit);
        if self.settings.overflow == Overflow::Warn && self.thrashing.is_endless() {
            let limit = 2 * limit.max(self.live() + bytes);
            self.limit.store(limit, Ordering::Relaxed);
            log::warn!(
                "the memory budget is raised to {}: under it a step would not end in reasonable time",
                size(limit)
            );
            if self.live().saturating_add(bytes) <= limit {
                return;
            }
        }
        if !evicted {
            self.stuck.store(self.live(), Ordering::Relaxed);
            self.overflows(op, bytes, limit, context::clock());
        }
    }

    /// Evicts until so many bytes fit below the limit and some more. Returns whether they fit, and how many tensors it looked at.
    fn evict(&self, bytes: u64, limit: u64) -> (bool, u64) {
        let now = context::clock();
        let mut searched = 0;
        let parts = self.nodes.lock().candidates.parts();
        let ahead = match parts {
            1 => limit / AHEAD,
            _ => limit / AHEAD_OF_PART / parts as u64,
        };
        let aim = limit.saturating_sub(bytes).saturating_sub(ahead);
        for _ in 0..parts {
            let part = self.nodes.lock().candidates.next_part();
            searched += part.len() as u64;
            searched += self.evict_cheapest(groups(part, now), now, aim);
            if self.live().saturating_add(bytes) <= limit {
                return (true, searched);
            }
        }
        (false, searched)
    }

    /// Evicts the groups of lowest score until no more than `aim` bytes are live. Returns how many it took a closer look at.
    fn evict_cheapest(&self, groups: Vec<Group>, now: u64, aim: u64) -> u64 {
        let mut searched = 0;
        let scored = groups.into_iter().enumerate().map(|(order, group)| Scored {
            score: group.least_score(now),
            order,
            group,
        });
        let mut heap: BinaryHeap<_> = scored.collect();
        while self.live() > aim
            && let Some(mut cheapest) = heap.pop()
        {
            // What is in the heap is a lower bound, or was right before others were evicted: both can only be too cheap.
            searched += 1;
            cheapest.score = cheapest.group.score(&self.neighbours, now);
            if heap.peek().is_some_and(|next| *next > cheapest) {
                heap.push(cheapest);
                continue;
            }
            for member in &cheapest.group.members {
                member.clone().rehearse();
                member.evict();
                self.neighbours.evicted(member);
            }
        }
        searched
    }

    fn overflows(&self, op: &'static str, bytes: u64, limit: u64, now: u64) {
        let refuses = self.settings.overflow == Overflow::Panic;
        if !refuses && !self.needs.is_clearly_larger(self.live() + bytes) {
            return;
        }
        let need = Need::of(&self.alive(), now, op, bytes).with_all_of(self.live());
        if refuses {
            panic!("{}", need.error(limit));
        }
        self.needs.keep(need);
        if self.needs.is_silent() {
            // At once; the largest need of each step is said at its end.
            self.needs.say(limit);
        }
    }
}

/// Makes room for the result of an operation, if its ledger has a budget.
pub(crate) fn make_room(ledger: &Ledger, op: &'static str, bytes: u64) {
    if let Some(budget) = ledger.budget()
        && !verify::is_rehearsing()
    {
        budget.make_room(op, bytes);
    }
}

/// The storages that can be freed.
fn groups(candidates: Vec<(Facts, Arc<dyn AnyEntry>)>, now: u64) -> Vec<Group> {
    let mut groups: Vec<(Group, u32)> = Vec::with_capacity(candidates.len());
    let mut shared: FxHashMap<usize, usize> = FxHashMap::default();
    for (facts, node) in candidates {
        if facts.locked || facts.last_used == now || facts.bytes == 0 {
            continue;
        }
        let new = groups.len();
        let index = match facts.residents {
            1 => new,
            _ => *shared.entry(facts.owner).or_insert(new),
        };
        if index == new {
            let group = Group {
                members: Vec::with_capacity(facts.residents as usize),
                bytes: facts.owner_bytes,
                last_used: 0,
                has_users: false,
            };
            groups.push((group, facts.residents));
        }
        let group = &mut groups[index].0;
        group.has_users |= facts.users > 0;
        group.members.push(node);
        group.last_used = group.last_used.max(facts.last_used);
    }
    // A member that has to stay keeps the storage.
    let whole = groups.into_iter();
    whole
        .filter(|(group, residents)| group.members.len() as u32 == *residents)
        .map(|(group, _)| group)
        .collect()
}

/// A group in the heap, the lowest score on top; by age where scores are equal.
struct Scored {
    score: f64,
    order: usize,
    group: Group,
}

impl Ord for Scored {
    fn cmp(&self, other: &Self) -> Order {
        other
            .score
            .total_cmp(&self.score)
            .then_with(|| other.order.cmp(&self.order))
    }
}

impl PartialOrd for Scored {
    fn partial_cmp(&self, other: &Self) -> Option<Order> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Scored {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other) == Order::Equal
    }
}

impl Eq for Scored {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::OpCost;
    use crate::op::op_table;

    #[test]
    fn few_sizes_are_remembered_where_shapes_vary() {
        let budget = Budget::new(MemoryBudget::bytes(1));
        let op = op_table().find(|op| op.name == "float_exp").expect("a row");
        for elements in 0..3 * EXPECTED {
            let mut cost = OpCost::new(op);
            cost.operand(&[elements].into(), burn_backend::DType::F32);
            budget.expect(cost.key(), 1);
            assert_eq!(budget.expected(cost.key()), Some(1));
        }
        assert!(budget.expected.lock().len() <= EXPECTED);
    }
}
