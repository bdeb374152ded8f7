//! Making room on a device.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Instant;

use burn_backend::DeviceId;
use parking_lot::Mutex;
use rustc_hash::{FxHashMap, FxHashSet};

use super::candidates::Candidates;
use super::memo::Memo;
use super::need::Needs;
use super::settings::MemoryBudget;
use super::thrashing::Thrashing;
use crate::budget::counted::{Marked, MarkedBytes};
use crate::error::{Need, size};
use crate::node::entry::{AnyEntry, Origin};
use crate::observe::snapshot::Snapshot;
use crate::observe::stats::Counts;
use crate::record::flags;
use crate::record::step::{Lineage, Phase, Step};
use crate::record::work::Work;
use crate::scope::tiny;

/// After a search that found too little to evict, the next one waits until live bytes have grown by
/// one part in so many.
const CHANGED: u64 = 64;

/// How many result sizes are remembered: some 100 KiB.
const EXPECTED: usize = 8192;

/// Bytes of an f64.
const LARGEST_ELEMENT_BYTES: u64 = 8;

/// When backward begins, results of together at most this part of the live bytes are settled.
const SMALL_PART: u64 = 16;

/// Up to so many tensors a budget does not ask whether most of them are kept by recipes alone.
const FEW_TENSORS: usize = 64;

/// A tape keeps more than one in so many of the tensors that are recorded. Where fewer have
/// handles, there is no tape.
const TAPE_PART: usize = 16;

/// The budget of one device.
pub(crate) struct Budget {
    pub settings: MemoryBudget,
    start: Instant,
    /// `u64::MAX` while it is measured.
    limit: AtomicU64,
    /// The most bytes of the first forward and backward pass, if the limit is a fraction of them; 0
    /// until these are over.
    measured: AtomicU64,
    /// Whether the backward pass of the step under way has begun.
    differentiated: AtomicBool,
    /// Whether the step under way has evicted a tensor with handles.
    is_needed: AtomicBool,
    /// Whether the step before did; also in the first step.
    was_needed: AtomicBool,
    pub counts: Arc<Counts>,
    /// Of gradients that are no nodes.
    gradients: Mutex<MarkedBytes>,
    /// Of constants of backward that are no nodes.
    constants: Mutex<MarkedBytes>,
    /// Bytes that were live when nothing more could be evicted.
    stuck: AtomicU64,
    nodes: Mutex<Nodes>,
    /// The last place that was given.
    places: AtomicU64,
    /// A hash of the operations of this step.
    program: AtomicU64,
    pub thrashing: Thrashing,
    needs: Needs,
    /// Bytes of results, by the keys of their operations.
    expected: Mutex<FxHashMap<u64, u64>>,
}

#[derive(Default)]
struct Nodes {
    /// In ascending order of their places.
    all: Vec<Known>,
    /// The last place among the candidates; nodes at later places are new.
    sorted: u64,
    candidates: Candidates,
    memo: Memo,
    /// The length at which dropped nodes are removed next.
    tidy_at: usize,
    /// The place from which on it is asked again whether there is a tape.
    look_for_tape_at: u64,
}

struct Known {
    place: u64,
    /// `None` once it is dropped.
    node: Option<Weak<dyn AnyEntry>>,
}

impl Known {
    fn node(&self) -> Option<Arc<dyn AnyEntry>> {
        self.node.as_ref()?.upgrade()
    }
}

/// The index of the node at this place.
fn find(all: &[Known], place: u64) -> Option<usize> {
    let after = all.last()?.place.checked_sub(place)? as usize;
    // The index if no later place is missing; it is larger if some are.
    let least = (all.len() - 1).saturating_sub(after);
    if all[least].place == place {
        return Some(least);
    }
    let at = all[least..].binary_search_by_key(&place, |known| known.place);
    at.ok().map(|at| least + at)
}

impl Nodes {
    /// Forgets what the optimizer left behind: where ranks shard it sizes differ, and all ranks
    /// must evict the same in forward and backward.
    fn begin_step(&mut self, last_place: u64) {
        self.all.retain(|known| {
            let node = known.node().filter(|node| !node.info().retired);
            node.inspect(|node| node.unlist()).is_some()
        });
        self.sorted = 0;
        self.candidates = Candidates::default();
        self.memo.begin_step(last_place);
    }

    /// What the step before has evicted in a search with this key, and whether that made the room.
    fn repeat(&mut self, key: u64) -> Option<(Vec<Arc<dyn AnyEntry>>, bool)> {
        let (places, made_room) = self.memo.repeat(key)?;
        let node = |place| self.all[find(&self.all, place)?].node();
        Some((places.filter_map(node).collect(), made_room))
    }

    /// Adds the new nodes to the candidates.
    fn sort_in(&mut self) {
        let sorted = |known: &Known| known.place <= self.sorted;
        let new = self.all.partition_point(sorted);
        for known in &self.all[new..] {
            if let Some(owner) = known.node().and_then(AnyEntry::list) {
                self.candidates.add(owner);
            }
        }
        self.sorted = self.all.last().map_or(self.sorted, |known| known.place);
    }
}

impl Budget {
    pub fn new(settings: MemoryBudget, counts: Arc<Counts>) -> Self {
        Self {
            settings,
            start: Instant::now(),
            limit: AtomicU64::new(settings.bytes),
            measured: AtomicU64::new(0),
            differentiated: AtomicBool::new(false),
            is_needed: AtomicBool::new(false),
            was_needed: AtomicBool::new(true),
            counts,
            gradients: Mutex::default(),
            constants: Mutex::default(),
            stuck: AtomicU64::new(u64::MAX),
            nodes: Mutex::default(),
            places: AtomicU64::new(0),
            program: AtomicU64::new(0),
            thrashing: Thrashing::default(),
            needs: Needs::default(),
            expected: Mutex::default(),
        }
    }

    pub fn live(&self) -> u64 {
        self.counts.live()
    }

    /// The limit; `None` while it is measured.
    pub fn limit(&self) -> Option<u64> {
        Some(self.limit.load(Ordering::Relaxed)).filter(|limit| *limit < u64::MAX)
    }

    /// The first forward and backward pass are over: measures what they took, gradients included,
    /// without so many bytes of state.
    fn measure(&self, state_bytes: u64) {
        if self.settings.fraction.is_some() && self.measured.load(Ordering::Relaxed) == 0 {
            let peak = self.counts.highest().saturating_sub(state_bytes);
            self.measured.store(peak, Ordering::Relaxed);
        }
    }

    /// Sets a limit that is a fraction, once the first step is over.
    fn set_measured_limit(&self) {
        if let Some(fraction) = self.settings.fraction
            && self.limit().is_none()
        {
            let measured = self.measured.load(Ordering::Relaxed);
            let limit = (measured as f64 * fraction) as u64;
            self.limit.store(limit, Ordering::Relaxed);
            let need = self.needs.largest();
            if self.settings.strict && need.bytes() > limit {
                panic!("{}", need.error(limit));
            }
        }
    }

    pub fn backward_begins(&self, step: Step) {
        if self.differentiated.swap(true, Ordering::Relaxed) {
            // Where no begin of a forward pass was noticed, the step before ends here.
            let new_bytes = self.settle_state(step);
            self.measure(new_bytes);
            self.set_measured_limit();
            self.step_is_over();
        }
        self.settle_small_results();
    }

    /// What was taken for a backward pass was part of the forward pass.
    pub fn backward_was_guessed(&self) {
        self.differentiated.store(false, Ordering::Relaxed);
    }

    /// Settles single numbers, and of the results that nothing was computed from the smallest,
    /// together at most a 16th of the live bytes: running statistics, metrics. A loss that the
    /// training loop holds would keep the whole forward pass.
    fn settle_small_results(&self) {
        let mut results = Vec::new();
        for node in self.alive() {
            let info = node.info();
            if info.users == 0 || !info.resident || info.origin == Origin::Kept {
                continue;
            }
            let is_single = info.owner_bytes <= LARGEST_ELEMENT_BYTES;
            if is_single || tiny::is_end(&node) {
                results.push((if is_single { 0 } else { info.owner_bytes }, node));
            }
        }
        results.sort_by_key(|(bytes, _)| *bytes);
        let mut left = self.live() / SMALL_PART;
        for (bytes, node) in results {
            if bytes > left {
                break;
            }
            left -= bytes;
            node.settle();
        }
    }

    /// The backward pass is over, and the tape has released what it kept: what is left is state.
    pub fn backward_is_over(&self, step: Step) {
        let new_bytes = self.settle_state(step);
        self.measure(new_bytes);
    }

    /// Settles what is left of steps that are over, and counts it no more. Returns the bytes of new
    /// tensors among it, such as parameters that were made in the first step.
    ///
    /// A tape that is still to be differentiated may hold a tensor too. So of what the last forward
    /// pass made only results are settled that nothing was computed from; the rest follows one step
    /// later. So does everything where one backward pass follows another: a forward pass that was
    /// not noticed may lie between them.
    fn settle_state(&self, step: Step) -> u64 {
        let is_left = |node: &Arc<dyn AnyEntry>| {
            let info = node.info();
            let is_result = || info.resident && info.is_float && tiny::is_end(node);
            let is_old = info.step.number + 1 < step.number;
            let is_over = is_old || step.phase != Phase::Backward && info.is_before(step);
            let is_state = match info.origin {
                // Constants of backward count until the training loop ends the step.
                Origin::Kept => is_over && info.step.phase == Phase::Forward,
                Origin::Recorded | Origin::Hosted => {
                    is_old || is_over && (info.step.phase != Phase::Forward || is_result())
                }
                Origin::Delivered => false,
            };
            let counts = info.users > 0 && !info.retired && info.lineage == Lineage::Activation;
            (counts && is_state).then_some(info)
        };
        // All are chosen before any is settled: to settle a result makes results of its operands.
        let alive = self.alive();
        let left: Vec<_> = alive
            .iter()
            .filter_map(|node| Some((is_left(node)?, node.clone())))
            .collect();
        drop(alive);
        let mut new_bytes = 0;
        for (info, node) in left {
            let is_new = info.op.work == Work::New || info.op.name.ends_with("_random");
            if is_new {
                new_bytes += info.owner_bytes;
            }
            if info.origin != Origin::Kept {
                node.clone().settle_back();
            }
            node.retire();
        }
        new_bytes
    }

    /// Ends a step: counts it if it thrashed, and logs its largest need if that exceeds the limit.
    pub fn step_is_over(&self) {
        if self.thrashing.judge(self.limit()) {
            self.counts.count(|stats| stats.thrashing_steps += 1);
        }
        if let Some(limit) = self.limit() {
            self.needs.say(limit);
        }
    }

    /// A step is over, and its gradients are state.
    fn ends_step(&self) {
        if self.differentiated.swap(false, Ordering::Relaxed) {
            if self.limit().is_some() {
                let was_needed = self.is_needed.swap(false, Ordering::Relaxed);
                self.was_needed.store(was_needed, Ordering::Relaxed);
            }
            self.measure(0);
            self.set_measured_limit();
        }
        self.step_is_over();
        self.counts.remove(self.gradients.lock().retire());
    }

    /// A forward pass begins: live tensors that descend from gradients are state, and no longer
    /// counted.
    pub fn forward_begins(&self, step: Step) {
        let new_bytes = self.settle_state(step);
        if self.differentiated.load(Ordering::Relaxed) {
            self.measure(new_bytes);
        }
        self.ends_step();
        for node in self.alive() {
            if node.info().lineage != Lineage::Activation {
                node.retire();
            }
        }
        self.stuck.store(u64::MAX, Ordering::Relaxed);
        self.program.store(0, Ordering::Relaxed);
        let last_place = self.places.load(Ordering::Relaxed);
        self.nodes.lock().begin_step(last_place);
    }

    /// A step ends: every live tensor is state. It loses its recipe and is no longer counted. What
    /// was made before the first step is not measured.
    pub fn step_ends(&self) {
        let has_trained = self.differentiated.load(Ordering::Relaxed);
        self.ends_step();
        self.counts.remove(self.constants.lock().retire());
        for node in self.alive() {
            node.settle();
            node.retire();
        }
        if !has_trained && self.settings.fraction.is_some() && self.limit().is_none() {
            self.counts.forget_highest();
        }
    }

    /// The gradients or the constants of backward that are no nodes.
    pub fn marked(&self, marked: Marked) -> &Mutex<MarkedBytes> {
        match marked {
            Marked::Gradient => &self.gradients,
            Marked::Constant => &self.constants,
        }
    }

    fn alive(&self) -> Vec<Arc<dyn AnyEntry>> {
        let nodes = self.nodes.lock();
        nodes.all.iter().filter_map(Known::node).collect()
    }

    /// What an operation needs that is about to make a result of so many bytes.
    fn need(&self, alive: &[Arc<dyn AnyEntry>], op: &'static str, result_bytes: u64) -> Need {
        let mut need = Need::of_nodes(alive, op, result_bytes);
        need.gradients_bytes += self.gradients.lock().bytes;
        need.random_bytes += self.constants.lock().bytes;
        need
    }

    /// Records what an operation of an unconstrained step needs, if the limit is being measured.
    #[cold]
    fn look(&self, op: &'static str, bytes: u64) {
        if self.settings.fraction.is_some() {
            let alive = self.alive();
            let need = self.need(&alive, op, bytes);
            self.needs.look(alive.len(), need);
        }
    }

    #[cold]
    fn evict_for(&self, op: &'static str, bytes: u64, limit: u64) {
        crate::node::drops::free(); // what a panic left still counts
        // After a search in vain another one is worth its time only once live bytes have changed.
        let stuck = self.stuck.load(Ordering::Relaxed);
        // If they were less meanwhile, tensors made in place of the freed ones may be evictable.
        let little = self.live().saturating_sub(stuck) <= stuck / CHANGED
            && self.counts.lowest.load(Ordering::Relaxed) >= stuck;
        // Except to log a need clearly larger than the largest known one, or to refuse the
        // operation.
        let known = !self.needs.is_clearly_larger(self.live() + bytes);
        if little && known && !self.settings.strict {
            return;
        }
        self.stuck.store(u64::MAX, Ordering::Relaxed);
        let start = Instant::now();
        let (fits, looks) = self.evict(bytes, limit);
        self.thrashing.searched(looks, limit);
        let time = start.elapsed();
        self.counts.count(|stats| {
            stats.searched_tensors += looks;
            stats.search_time += time;
        });
        if !self.settings.strict && self.thrashing.is_endless() {
            let limit = 2 * limit.max(self.live() + bytes);
            self.limit.store(limit, Ordering::Relaxed);
            burn_decorator::warn_user!(
                "the memory budget is raised to {}: under it a step would not end in reasonable time",
                size(limit)
            );
            return;
        }
        if !fits {
            self.stuck.store(self.live(), Ordering::Relaxed);
            self.counts.lowest.store(self.live(), Ordering::Relaxed);
            self.overflows(op, bytes, limit);
        }
    }

    /// Evicts until so many bytes fit below the limit. Returns whether they fit, and how many
    /// storages it looked at.
    fn evict(&self, bytes: u64, limit: u64) -> (bool, u64) {
        let now = flags::now();
        let fits = || self.live().saturating_add(bytes) <= limit;
        let program = self.program.load(Ordering::Relaxed);
        let key = [self.live(), bytes, limit].into_iter().fold(program, mix);
        let known = self.nodes.lock().repeat(key);
        let goes_on = known.is_some();
        if let Some((members, made_room)) = known {
            if members.iter().any(|member| member.info().users > 0) {
                self.is_needed.store(true, Ordering::Relaxed);
            }
            members.into_iter().for_each(|member| member.evict());
            if fits() == made_room {
                return (made_room, 0);
            }
        }
        let mut nodes = self.nodes.lock();
        nodes.memo.differs(goes_on);
        nodes.sort_in();
        nodes.candidates.begin(now);
        let mut again = true;
        while !fits() {
            let Some(group) = nodes.candidates.take_cheapest(now) else {
                // As an operation's replays proceed, fewer of the tensors that they brought back
                // are still needed.
                if std::mem::take(&mut again) && nodes.candidates.release() {
                    continue;
                }
                break;
            };
            drop(nodes);
            if group.has_users {
                self.is_needed.store(true, Ordering::Relaxed);
            }
            group.members.iter().for_each(|member| member.evict());
            nodes = self.nodes.lock();
            for member in group.members {
                let info = member.info();
                nodes.memo.evicts(info.place);
                // One that another thread began to use meanwhile stays a candidate.
                if info.resident
                    && let Some(owner) = member.list()
                {
                    nodes.candidates.add(owner);
                }
            }
        }
        nodes.memo.ends(key, fits());
        (fits(), std::mem::take(&mut nodes.candidates.looks))
    }

    fn overflows(&self, op: &'static str, bytes: u64, limit: u64) {
        let strict = self.settings.strict;
        if !strict && !self.needs.is_clearly_larger(self.live() + bytes) {
            return;
        }
        let mut need = self.need(&self.alive(), op, bytes);
        // Nothing more can be evicted: all else that is live stays.
        let counted = need.bytes() - need.result_bytes;
        need.kept_bytes += self.live().saturating_sub(counted);
        if strict {
            panic!("{}", need.error(limit));
        }
        self.needs.keep(need);
        if self.needs.said_bytes.load(Ordering::Relaxed) == 0 {
            // The first is logged at once; later the largest need of each step is logged at its
            // end.
            self.needs.say(limit);
        }
    }

    /// Whether a branch point, which several recipes start from, keeps its storage without handles:
    /// in forward, if tensors with handles are evicted. Otherwise the limit is above all that a
    /// step without it would hold, and storages that only replays need would raise the peak.
    pub fn keeps_branch_points(&self) -> bool {
        let is = |flag: &AtomicBool| flag.load(Ordering::Relaxed);
        !is(&self.differentiated)
            && self.limit().is_some()
            && (is(&self.was_needed) || is(&self.is_needed))
    }

    /// Evicts an eighth of what is live. Returns the bytes that this frees.
    pub fn relieve(&self) -> u64 {
        let live = self.live();
        self.stuck.store(u64::MAX, Ordering::Relaxed);
        self.evict(0, live - (live / 8).max(1).min(live));
        live.saturating_sub(self.live())
    }

    /// The live tensors, by operation.
    pub fn holders(&self, device: DeviceId) -> Snapshot {
        let mut storages = FxHashSet::default();
        let alive = self.alive();
        let tensors = alive.iter().rev().filter_map(|node| {
            let info = node.info();
            let counts = info.resident && !info.retired && storages.insert(info.owner);
            counts.then(|| (info.op.name, node.kind(), info.owner_bytes))
        });
        Snapshot::new(device, self.start.elapsed(), self.live(), tensors)
    }

    /// Counts an operation and its work.
    pub fn computed(&self, key: u64, cost_ns: f32) {
        let program = mix(self.program.load(Ordering::Relaxed), key);
        self.program.store(program, Ordering::Relaxed);
        self.thrashing.computed(cost_ns);
    }

    pub fn expect(&self, key: u64, bytes: u64) {
        let mut expected = self.expected.lock();
        if expected.len() >= EXPECTED {
            // Shapes vary from step to step: later steps have other ones.
            expected.clear();
        }
        expected.insert(key, bytes);
    }

    /// The size that an operation's result had last time.
    pub fn expected(&self, key: u64) -> Option<u64> {
        self.expected.lock().get(&key).copied()
    }

    /// A new place. Only the thread whose budget it is takes them.
    pub fn next_place(&self) -> u64 {
        let place = self.places.load(Ordering::Relaxed) + 1;
        self.places.store(place, Ordering::Relaxed);
        place
    }

    /// Adds the new node at this place.
    pub fn register(&self, place: u64, node: Weak<dyn AnyEntry>) {
        let mut nodes = self.nodes.lock();
        debug_assert!(nodes.all.last().is_none_or(|last| last.place < place));
        nodes.all.push(Known {
            place,
            node: Some(node),
        });
        if nodes.all.len() > nodes.tidy_at {
            let is_alive = |node: &Weak<dyn AnyEntry>| node.strong_count() > 0;
            let all = &mut nodes.all;
            all.retain(|known| known.node.as_ref().is_some_and(is_alive));
            nodes.tidy_at = nodes.all.len() * 3 / 2 + 64;
        }
        let is_time = place >= nodes.look_for_tape_at;
        drop(nodes);
        if is_time && !self.differentiated.load(Ordering::Relaxed) {
            self.settle_without_tape(place);
        }
    }

    /// Settles every tensor with handles if almost all others are kept by recipes alone: there is
    /// no tape that would use these, and the recipes of a state that is carried on, such as a cache
    /// of keys and values, would reach through all that was ever computed. Counts no gradients,
    /// which are nodes only in a trace.
    #[cold]
    fn settle_without_tape(&self, place: u64) {
        let (mut recorded, mut used) = (0, Vec::new());
        for node in self.alive() {
            let info = node.info();
            if matches!(info.origin, Origin::Recorded | Origin::Hosted) {
                recorded += 1;
                used.extend((info.users > 0).then_some(node));
            }
        }
        let has_tape = recorded <= FEW_TENSORS || used.len() * TAPE_PART > recorded;
        let next = if has_tape { recorded } else { 0 };
        self.nodes.lock().look_for_tape_at = place + next.max(FEW_TENSORS) as u64;
        if !has_tape {
            used.into_iter().for_each(AnyEntry::settle_back);
        }
    }

    /// Removes a node that is being dropped: what refers to it would keep its allocation.
    pub fn forget(&self, place: u64) {
        // A search may be what drops the node.
        let Some(mut nodes) = self.nodes.try_lock() else {
            return;
        };
        if let Some(at) = find(&nodes.all, place) {
            nodes.all[at].node = None;
        }
        while nodes.all.pop_if(|known| known.node.is_none()).is_some() {}
    }

    /// Adds a node that is resident again to those that may be evicted.
    pub fn list(&self, node: &Arc<impl AnyEntry + 'static>) {
        let mut nodes = self.nodes.lock();
        if !nodes.memo.repeats
            && let Some(owner) = node.clone().list()
        {
            nodes.candidates.add(owner);
        }
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
}

fn mix(hash: u64, number: u64) -> u64 {
    (hash.rotate_left(5) ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_sizes_are_remembered_where_shapes_vary() {
        let budget = Budget::new(MemoryBudget::bytes(1), Arc::default());
        for key in 0..3 * EXPECTED as u64 {
            budget.expect(key, 1);
            assert_eq!(budget.expected(key), Some(1));
        }
        assert!(budget.expected.lock().len() <= EXPECTED);
    }
}
