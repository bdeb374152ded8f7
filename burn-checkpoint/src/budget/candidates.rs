//! The tensors that may be evicted, cheapest first.
//!
//! Of many tensors one part is searched at a time: how long a search takes does not depend on how many there are.

use std::cmp::Ordering as Order;
use std::sync::{Arc, Weak};

use rustc_hash::FxHashMap;

use super::classes::CostClasses;
use crate::entry::{AnyEntry, NodeInfo, Origin};

/// All are looked through at the latest when there are so many: what a tensor took itself, beside its storage, is freed only then.
const LEAST: usize = 256;

/// So many tensors are looked at as a whole.
const WHOLE: usize = 4096;

/// Of more, parts of about so many.
const PART: usize = 256;

/// Resident tensors that can come back. Some are no longer, or gone: that is found out when they are looked at.
pub(super) struct Candidates {
    /// A power of two of them. Tensors with one storage are in one part; all parts are alike.
    parts: Vec<Vec<Candidate>>,
    /// The part to be looked at next.
    next: usize,
    count: usize,
    /// How many there may be before all are looked through.
    tidy_at: usize,
}

struct Candidate {
    storage: u64,
    node: Weak<dyn AnyEntry>,
}

impl Default for Candidates {
    fn default() -> Self {
        Self {
            parts: vec![Vec::new()],
            next: 0,
            count: 0,
            tidy_at: LEAST,
        }
    }
}

impl Candidates {
    /// Adds a tensor with the storage of this number.
    pub fn add(&mut self, storage: u64, node: Weak<dyn AnyEntry>) {
        let part = part(storage, self.parts.len());
        self.parts[part].push(Candidate { storage, node });
        self.count += 1;
        if self.count > self.tidy_at {
            self.tidy();
        }
    }

    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// The tensors of the next part; forgets those that cannot be evicted any more.
    pub fn next_part(&mut self) -> Vec<(NodeInfo, Arc<dyn AnyEntry>)> {
        let part = &mut self.parts[self.next];
        let mut found = Vec::with_capacity(part.len());
        let before = part.len();
        part.retain(|candidate| {
            let node = candidate.node();
            let is_left = node.is_some();
            found.extend(node);
            is_left
        });
        self.count -= before - part.len();
        self.next = (self.next + 1) % self.parts.len();
        found
    }

    /// Forgets what cannot be evicted any more, and adapts the number of parts.
    fn tidy(&mut self) {
        for part in &mut self.parts {
            part.retain(|candidate| candidate.node().is_some());
        }
        self.count = self.parts.iter().map(Vec::len).sum();
        self.tidy_at = LEAST.max(2 * self.count);
        let parts = match self.count {
            0..=WHOLE => 1,
            count => (count / PART).next_power_of_two(),
        };
        self.next = 0;
        if parts == self.parts.len() {
            return;
        }
        let fresh = (0..parts).map(|_| Vec::new()).collect();
        let before = std::mem::replace(&mut self.parts, fresh);
        for candidate in before.into_iter().flatten() {
            self.parts[part(candidate.storage, parts)].push(candidate);
        }
    }
}

impl Candidate {
    /// The tensor, if it may be evicted now or later.
    #[inline]
    fn node(&self) -> Option<(NodeInfo, Arc<dyn AnyEntry>)> {
        let node = self.node.upgrade()?;
        let info = node.info();
        if info.resident && matches!(info.origin, Origin::Recorded | Origin::Hosted) {
            Some((info, node))
        } else {
            node.unlist();
            None
        }
    }
}

/// The part of a storage. Numbers are mixed: every n-th operation of a model is alike.
fn part(storage: u64, parts: usize) -> usize {
    let mixed = storage.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32; // Fibonacci hashing
    mixed as usize & (parts - 1)
}

/// How often a branch point without handles is needed, relative to a tensor with handles: only if something that was made of it is
/// evicted as well. In a GPT of 12 blocks values from 0.1 to 0.6 change what is replayed by less than a tenth, both at 60 % and at
/// 25 % of its bytes; at 0.01, where branch points are evicted first, 1.5 times as much is replayed at 25 %.
const BRANCH_POINT_DEMAND: f64 = 0.3;

/// Tensors that share a storage: it is freed when all of them are evicted.
pub(super) struct Group {
    pub members: Vec<Arc<dyn AnyEntry>>,
    pub bytes: u64,
    /// Whether handles refer to any of them.
    pub has_users: bool,
    /// The number of the operation that used any of them last.
    pub last_used: u64,
}

impl Group {
    /// DTR's heuristic (section 4.1): cost to bring it back, over bytes times staleness. The cost includes that of evicted
    /// ancestors, which would have to come back first; without it long runs are evicted whole and replayed again and again.
    pub fn score(&self, classes: &CostClasses, now: u64) -> f64 {
        classes.cost_ns(&self.members) / self.worth(now)
    }

    /// The score if nothing had to come back first: no more than [`Self::score`], and quickly known.
    pub fn least_score(&self, now: u64) -> f64 {
        let own = self.members.iter().map(|node| f64::from(node.cost_ns()));
        own.sum::<f64>() / self.worth(now)
    }

    /// Bytes times staleness, over how often they are needed.
    fn worth(&self, now: u64) -> f64 {
        let staleness = now.saturating_sub(self.last_used).max(1);
        let demand = if self.has_users {
            1.0
        } else {
            BRANCH_POINT_DEMAND
        };
        self.bytes.max(1) as f64 * staleness as f64 / demand
    }
}

/// The storages that can be freed.
pub(super) fn groups(candidates: Vec<(NodeInfo, Arc<dyn AnyEntry>)>, now: u64) -> Vec<Group> {
    let mut groups: Vec<(Group, u32)> = Vec::with_capacity(candidates.len());
    let mut shared: FxHashMap<usize, usize> = FxHashMap::default();
    for (info, node) in candidates {
        if info.locked || info.last_used == now || info.bytes == 0 {
            continue;
        }
        let new = groups.len();
        let index = match info.residents {
            1 => new,
            _ => *shared.entry(info.owner).or_insert(new),
        };
        if index == new {
            let group = Group {
                members: Vec::with_capacity(info.residents as usize),
                bytes: info.owner_bytes,
                last_used: 0,
                has_users: false,
            };
            groups.push((group, info.residents));
        }
        let group = &mut groups[index].0;
        group.has_users |= info.users > 0;
        group.members.push(node);
        group.last_used = group.last_used.max(info.last_used);
    }
    // A member that has to stay keeps the storage.
    let whole = groups.into_iter();
    whole
        .filter(|(group, residents)| group.members.len() as u32 == *residents)
        .map(|(group, _)| group)
        .collect()
}

/// A group in the heap, the lowest score on top; by age where scores are equal.
pub(super) struct Scored {
    pub score: f64,
    pub order: usize,
    pub group: Group,
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
