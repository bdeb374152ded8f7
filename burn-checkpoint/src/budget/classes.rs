//! What it costs to bring back the evicted tensors next to a tensor, kept as classes that merge: h_DTR^eq of Kirisame et al. (2021).
//!
//! A class is a set of evicted tensors that are inputs of each other, with the sum of their costs (union-find). An eviction merges
//! the classes of its neighbours. A tensor that comes back takes its cost out of its class; the class is not split, so it may hold
//! what is connected no more: all classes are forgotten from time to time and made anew from what is evicted then.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use parking_lot::Mutex;

use crate::entry::{AnyEntry, ClassSlot};

/// So many members are never forgotten.
const LEAST: usize = 1024;

/// The others are once there are so many times more of them than evicted tensors.
const STALE: usize = 2;

/// The classes of one budget. A node knows its member by its [`ClassSlot`].
#[derive(Default)]
pub(crate) struct CostClasses(Mutex<Classes>);

#[derive(Default)]
struct Classes {
    members: Vec<Member>,
    /// How often all members were forgotten.
    generation: u32,
    evicted: usize,
}

struct Member {
    parent: u32,
    /// Its cost while it is evicted.
    own_ns: f32,
    /// Of a root: the costs of all members of the class.
    sum_ns: f64,
    evicted: bool,
    /// While it is resident: members that were evicted next to it.
    beside: Vec<u32>,
}

/// Whether a node ever was a member.
fn is_taken(slot: &ClassSlot) -> bool {
    slot.0.load(Ordering::Relaxed) != 0
}

impl CostClasses {
    /// Nanoseconds to bring these back: their own, and those of the classes of their evicted inputs, which have to come back first.
    pub fn cost_ns(&self, nodes: &[Arc<dyn AnyEntry>]) -> f64 {
        let mut unknown = Vec::new();
        let cost_ns = self.known_ns(nodes, &mut unknown);
        if unknown.is_empty() {
            return cost_ns;
        }
        for node in unknown {
            self.evicted(&node);
        }
        self.known_ns(nodes, &mut Vec::new())
    }

    fn known_ns(&self, nodes: &[Arc<dyn AnyEntry>], unknown: &mut Vec<Arc<dyn AnyEntry>>) -> f64 {
        let mut own_ns = 0.0;
        let mut roots = Vec::new();
        for node in nodes {
            own_ns += f64::from(node.cost_ns());
            node.sources(&mut |source, resident, own| {
                if !resident {
                    match self.0.lock().evicted_root(source.class()) {
                        Some(root) => roots.push(root),
                        None => unknown.push(own()),
                    }
                }
            });
        }
        roots.sort_unstable();
        roots.dedup();
        let classes = self.0.lock();
        let sums = roots.iter().map(|root| classes.members[*root].sum_ns.max(0.0));
        own_ns + sums.sum::<f64>()
    }

    /// A node is evicted: its class merges with those of its neighbours.
    pub fn evicted(&self, node: &Arc<dyn AnyEntry>) {
        let mut stack = vec![node.clone()];
        while let Some(node) = stack.pop() {
            let cost_ns = node.cost_ns();
            if !self.0.lock().evict(node.class(), cost_ns) {
                continue;
            }
            node.sources(&mut |source, resident, own| {
                let is_new = self
                    .0
                    .lock()
                    .connect(node.class(), source.class(), resident);
                if is_new && !resident {
                    stack.push(own());
                }
            });
        }
    }

    /// A node is resident again.
    pub fn came_back(&self, slot: &ClassSlot) {
        if is_taken(slot) {
            self.0.lock().came_back(slot);
        }
    }

    /// A step is over: most members are those of tensors that are gone.
    pub fn forget(&self) {
        self.0.lock().forget();
    }

    /// A node is gone.
    pub fn gone(&self, slot: &ClassSlot) {
        if !is_taken(slot) {
            return;
        }
        let mut classes = self.0.lock();
        if let Some(member) = classes.known(slot) {
            classes.remove(member);
        }
    }
}

impl Classes {
    fn forget(&mut self) {
        self.members.clear();
        self.evicted = 0;
        self.generation = self.generation.wrapping_add(1);
    }

    fn tag(&self) -> u64 {
        (u64::from(self.generation) + 1) << 32
    }

    fn known(&self, slot: &ClassSlot) -> Option<usize> {
        let slot = slot.0.load(Ordering::Relaxed);
        let member = slot.wrapping_sub(self.tag());
        (member < self.members.len() as u64).then_some(member as usize)
    }

    /// The class of a node that is known to be evicted.
    fn evicted_root(&mut self, slot: &ClassSlot) -> Option<usize> {
        let member = self.known(slot)?;
        let evicted = self.members[member].evicted;
        evicted.then(|| self.root(member))
    }

    /// The member of a node, a new one if it has none.
    fn member(&mut self, slot: &ClassSlot) -> usize {
        match self.known(slot) {
            Some(member) => member,
            None => self.add(slot, Vec::new()),
        }
    }

    fn add(&mut self, slot: &ClassSlot, beside: Vec<u32>) -> usize {
        let member = self.members.len();
        slot.0.store(self.tag() + member as u64, Ordering::Relaxed);
        self.members.push(Member {
            parent: member as u32,
            own_ns: 0.0,
            sum_ns: 0.0,
            evicted: false,
            beside,
        });
        member
    }

    /// The root of a class, with paths halved.
    fn root(&mut self, mut member: usize) -> usize {
        while self.members[member].parent as usize != member {
            let above = self.members[member].parent as usize;
            let next = self.members[above].parent;
            self.members[member].parent = next;
            member = next as usize;
        }
        member
    }

    fn merge(&mut self, one: usize, other: usize) {
        let (one, other) = (self.root(one), self.root(other));
        if one != other {
            // The newer under the older: chains are evicted mostly in order, so paths stay short.
            let (root, below) = (one.min(other), one.max(other));
            self.members[below].parent = root as u32;
            self.members[root].sum_ns += self.members[below].sum_ns;
        }
    }

    /// Whether a node was not known to be evicted.
    fn evict(&mut self, slot: &ClassSlot, cost_ns: f32) -> bool {
        if self.members.len() >= LEAST + STALE * self.evicted {
            self.forget();
        }
        let member = self.member(slot);
        if self.members[member].evicted {
            return false;
        }
        self.evicted += 1;
        self.members[member].evicted = true;
        self.members[member].own_ns = cost_ns;
        let root = self.root(member);
        self.members[root].sum_ns += f64::from(cost_ns);
        for beside in std::mem::take(&mut self.members[member].beside) {
            self.merge(member, beside as usize);
        }
        true
    }

    /// An evicted node has an input. Returns whether that one is not known to be evicted.
    fn connect(&mut self, node: &ClassSlot, input: &ClassSlot, resident: bool) -> bool {
        let (node, input) = (self.member(node), self.member(input));
        if !resident {
            self.merge(node, input);
        } else if !self.members[input].evicted {
            let mut beside = std::mem::take(&mut self.members[input].beside);
            if beside.len() >= 8 && beside.len().is_power_of_two() {
                for member in &mut beside {
                    *member = self.root(*member as usize) as u32;
                }
                beside.sort_unstable();
                beside.dedup();
            }
            beside.push(node as u32);
            self.members[input].beside = beside;
        }
        !self.members[input].evicted
    }

    /// Takes a member's cost out of its class. Returns whether it was evicted.
    fn remove(&mut self, member: usize) -> bool {
        let was_evicted = std::mem::take(&mut self.members[member].evicted);
        if was_evicted {
            self.evicted -= 1;
            let own_ns = std::mem::take(&mut self.members[member].own_ns);
            let root = self.root(member);
            self.members[root].sum_ns -= f64::from(own_ns);
        }
        was_evicted
    }

    fn came_back(&mut self, slot: &ClassSlot) {
        if let Some(member) = self.known(slot)
            && self.remove(member)
        {
            // What is left of the class is next to it.
            self.add(slot, vec![member as u32]);
        }
    }
}
