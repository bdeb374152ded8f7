//! The storages that may be evicted, as a queue that is put in order only as far as it is used.
//!
//! DTR's heuristic (Kirisame et al., section 4.1) is the cost to bring a storage back, over its bytes times its staleness. Cost over bytes,
//! the *price*, changes seldom; staleness changes with each operation, but of equal prices the oldest is always the cheapest. So there is a
//! heap by age for each price: an eviction looks at the oldest of each. A price that is out of date is found out when it is looked at.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Weak};

use super::replay_cost::cost_ns;
use crate::entry::{AnyEntry, Group};

/// All are looked through at the latest when there are so many: what a tensor took itself, beside its storage, is freed only then.
const LEAST: usize = 256;

/// Prices differ by at most a quarter in a class: those with the same exponent and the same first two bits.
const PRICE_SHIFT: u32 = 50;

/// The class of the lowest price, 2^-24 nanoseconds a byte, and how many there are up to 2^24.
const LOWEST: u64 = (1023 - 24) << 2;
const CLASSES: usize = 48 << 2;

/// How often a branch point without handles is needed, relative to a tensor with handles: only if something that was made of it is
/// evicted as well. In a GPT of 12 blocks values from 0.1 to 0.6 change what is replayed by less than a tenth, both at 60 % and at
/// 25 % of its bytes; at 0.01, where branch points are evicted first, 1.5 times as much is replayed at 25 %.
const BRANCH_POINT_DEMAND: f64 = 0.3;

/// What a loop writes into, part by part, is used by its next turn, and comes back only by a replay of all turns: it goes last.
const WRITTEN_DEMAND: f64 = 1000.0;

/// A storage of less than this part of the mean stays (the paper ignores what is below 1 %): where a limit cannot be kept, running
/// statistics would go too, and a replay of the whole step would bring them back.
const TINY: u64 = 64;

/// Of so few there is no mean.
const FEW: u64 = 64;

/// Storages that can come back. Some are no longer resident, or gone: that is found out when they are looked at.
pub(super) struct Candidates {
    /// By price, the oldest on top.
    classes: Vec<BinaryHeap<Reverse<Candidate>>>,
    /// Which of them are not empty.
    used: Vec<usize>,
    count: usize,
    /// How many were added so far: the order of those of one age.
    added: u64,
    /// Bytes of these.
    added_bytes: u64,
    /// How many may be added before all are looked through.
    tidy_at: u64,
    /// What the operation with this number or its replays needed when it was looked at.
    held: (u64, Vec<Weak<dyn AnyEntry>>),
    /// How often one was looked at.
    pub looks: u64,
}

struct Candidate {
    last_used: u64,
    order: u64,
    owner: Weak<dyn AnyEntry>,
}

impl Default for Candidates {
    fn default() -> Self {
        Self {
            classes: (0..CLASSES).map(|_| BinaryHeap::new()).collect(),
            used: Vec::new(),
            count: 0,
            added: 0,
            added_bytes: 0,
            tidy_at: LEAST as u64,
            held: (0, Vec::new()),
            looks: 0,
        }
    }
}

impl Candidates {
    /// Adds the storage of this owner: at first by what the tensors in it cost alone.
    pub fn add(&mut self, owner: Arc<dyn AnyEntry>) {
        let Some(group) = owner.clone().group() else {
            return owner.unlist();
        };
        self.put(&owner, &group, own_ns(&group) / worth(&group));
        if self.added >= self.tidy_at {
            self.tidy();
        }
    }

    fn put(&mut self, owner: &Arc<dyn AnyEntry>, group: &Group, price: f64) {
        let at = class(price);
        if self.classes[at].is_empty() {
            self.used.push(at);
        }
        self.classes[at].push(Reverse(Candidate {
            last_used: group.last_used,
            order: self.added,
            owner: Arc::downgrade(owner),
        }));
        self.count += 1;
        self.added += 1;
        self.added_bytes += group.bytes;
    }

    /// Takes the cheapest out; `None` if nothing may be evicted now. `now` is what staleness is counted from.
    pub fn take_cheapest(&mut self, now: u64) -> Option<Group> {
        loop {
            let (_, at) = self.first(now)?;
            let Reverse(candidate) = self.classes[at].pop()?;
            if self.classes[at].is_empty() {
                self.used.retain(|used| *used != at);
            }
            self.count -= 1;
            let Some(owner) = candidate.owner.upgrade() else {
                continue;
            };
            self.looks += 1;
            let Some(group) = owner.clone().group() else {
                owner.unlist();
                continue;
            };
            let is_tiny = group.bytes < self.added_bytes / self.added / TINY;
            if group.is_held || is_tiny && self.added > FEW {
                self.held.1.push(candidate.owner);
                continue;
            }
            let staleness = staleness(now, group.last_used);
            let next = self.first(now).map_or(f64::INFINITY, |(next, _)| next);
            // One that costs more than four times as much as the next is not the cheapest, whatever it costs.
            let enough_ns = 4.0 * worth(&group) * (next * staleness).max(least_price(at));
            let price = cost_ns(&group.members, enough_ns) / worth(&group);
            let is_right = class(price) <= at && group.last_used <= candidate.last_used;
            if is_right || price <= next * staleness {
                owner.unlist();
                return Some(group);
            }
            self.put(&owner, &group, price);
        }
    }

    /// A search for the operation of this number begins: what another one needed may go.
    pub fn begin(&mut self, operation: u64) {
        if self.held.0 != operation {
            self.held.0 = operation;
            self.release();
        }
    }

    /// Looks at what was needed once more. Returns whether there was any.
    pub fn release(&mut self) -> bool {
        let held = std::mem::take(&mut self.held.1);
        let any = !held.is_empty();
        for owner in held.iter().filter_map(Weak::upgrade) {
            self.add(owner);
        }
        any
    }

    /// The least score and its class.
    fn first(&self, now: u64) -> Option<(f64, usize)> {
        let mut first = None;
        for at in &self.used {
            if let Some(Reverse(oldest)) = self.classes[*at].peek() {
                let score = least_price(*at) / staleness(now, oldest.last_used);
                if first.is_none_or(|least| (score, *at) < least) {
                    first = Some((score, *at));
                }
            }
        }
        first
    }

    /// Forgets what is gone.
    fn tidy(&mut self) {
        for class in &mut self.classes {
            class.retain(|candidate| candidate.0.owner.strong_count() > 0);
        }
        self.used.retain(|at| !self.classes[*at].is_empty());
        self.count = self.classes.iter().map(BinaryHeap::len).sum();
        self.tidy_at = self.added + (LEAST.max(self.count)) as u64;
    }
}

fn class(price: f64) -> usize {
    ((price.to_bits() >> PRICE_SHIFT).saturating_sub(LOWEST) as usize).min(CLASSES - 1)
}

fn least_price(class: usize) -> f64 {
    f64::from_bits((class as u64 + LOWEST) << PRICE_SHIFT)
}

/// What each of its tensors costs alone.
fn own_ns(group: &Group) -> f64 {
    let own = group.members.iter().map(|node| f64::from(node.cost_ns()));
    own.sum()
}

/// Its bytes, over how often they are needed.
fn worth(group: &Group) -> f64 {
    let demand = match group.has_users {
        true if group.overwrites => WRITTEN_DEMAND,
        true => 1.0,
        false => BRANCH_POINT_DEMAND,
    };
    group.bytes.max(1) as f64 / demand
}

fn staleness(now: u64, last_used: u64) -> f64 {
    now.saturating_sub(last_used).max(1) as f64
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.last_used, self.order).cmp(&(other.last_used, other.order))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Candidate {
    fn eq(&self, other: &Self) -> bool {
        self.order == other.order
    }
}

impl Eq for Candidate {}
