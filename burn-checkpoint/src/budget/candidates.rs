//! The storages that may be evicted, as a queue that is sorted lazily.
//!
//! DTR's heuristic (Kirisame et al., section 4.1) is the cost to bring a storage back, over its
//! bytes times its staleness. The cost counts once more for each time that the storage came back.
//! Otherwise a large tensor that is cheap to compute and that each of many time steps uses is
//! evicted and brought back between them. Cost over bytes, the *price*, changes seldom, staleness
//! with each operation, but of equal prices the one unused for longest is always the cheapest. So
//! each class of prices is sorted by last use, and an eviction compares the oldest ones, where
//! outdated prices are corrected.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

use crate::node::entry::{AnyEntry, Group};

/// Dropped nodes are removed after at least so many additions: until then an entry keeps the memory
/// of the node, without its storage.
const LEAST: usize = 256;

/// Prices differ by at most a quarter in a class: those with the same exponent and the same first
/// two bits.
const PRICE_SHIFT: u32 = 50;

/// The classes of the lowest price, 2^-24 nanoseconds a byte, and of the highest, just below 2^24.
const LOWEST: u64 = (1023 - 24) << 2;
const HIGHEST: u64 = ((1023 + 24) << 2) - 1;

/// How often a branch point without handles is needed, relative to a tensor with handles: only if
/// what was computed from it is evicted too. In a GPT of 12 blocks 0.1 to 0.6 change replays by
/// under a tenth at 60 % and 25 % of its bytes; 0.01, which evicts branch points first, replays 1.5
/// times as much at 25 %.
const BRANCH_POINT_DEMAND: f64 = 0.3;

/// A tensor that a loop writes into comes back only by a replay of all iterations: it is evicted
/// last.
const WRITTEN_DEMAND: f64 = 1000.0;

/// A storage smaller than this part of the mean is not evicted (the paper ignores those below 1 %):
/// a limit that cannot be kept would else evict running statistics too, which only a replay of the
/// whole step brings back.
const TINY: u64 = 64;

/// The mean is used only after more additions than this: soon, because the statistics of the first
/// batch norm, evicted, are brought back by one replay that holds all results before them.
const FEW: u64 = 16;

/// The costs of so many evicted inputs are added up, so that the time does not grow with the number
/// of evicted tensors. With 64 `ctc_loss` under 37 % of its bytes evicts every state of its chain,
/// and replays half of its operations twice.
const INPUTS: usize = 1024;

/// Storages that can come back. Some entries are evicted or dropped by now: these are skipped when
/// a search takes them.
#[derive(Default)]
pub(super) struct Candidates {
    /// The classes that are not empty.
    classes: Vec<Class>,
    added: u64,
    added_bytes: u64,
    /// Value of `added` at which dropped nodes are removed next.
    tidy_at: u64,
    /// The number of the operation that the last search was for.
    searched_for: u64,
    /// Storages that searches for it passed over: in use, or tiny.
    held: Vec<Weak<dyn AnyEntry>>,
    /// Candidates examined since this was last read.
    pub looks: u64,
    /// A buffer for the evicted inputs of a candidate, empty between searches.
    evicted: Vec<Arc<dyn AnyEntry>>,
}

struct Class {
    number: u64,
    /// The last use of the oldest candidate: a search compares these alone.
    last_used: u64,
    /// By last use, and those of one operation by their additions.
    queue: BTreeMap<(u64, u64), Weak<dyn AnyEntry>>,
}

impl Candidates {
    /// Adds the storage of this owner. Its first price counts what its tensors cost alone, without
    /// evicted inputs.
    pub fn add(&mut self, owner: Arc<dyn AnyEntry>) {
        let Some(group) = owner.clone().group() else {
            return owner.unlist();
        };
        let own_ns = group.members.iter().map(|node| f64::from(node.cost_ns()));
        self.put(&owner, &group, own_ns.sum::<f64>() / worth(&group));
        if self.added >= self.tidy_at {
            self.tidy();
        }
    }

    fn put(&mut self, owner: &Arc<dyn AnyEntry>, group: &Group, price: f64) {
        let (number, last_used) = (class_of(price), group.last_used);
        let known = self.classes.iter().position(|own| own.number == number);
        let index = known.unwrap_or_else(|| {
            let queue = BTreeMap::new();
            self.classes.push(Class {
                number,
                last_used,
                queue,
            });
            self.classes.len() - 1
        });
        let class = &mut self.classes[index];
        class.last_used = class.last_used.min(last_used);
        let place = (last_used, self.added);
        class.queue.insert(place, Arc::downgrade(owner));
        self.added += 1;
        self.added_bytes += group.bytes;
    }

    /// Removes and returns the cheapest storage; `None` if nothing may be evicted now. `now` is
    /// what staleness is counted from.
    pub fn take_cheapest(&mut self, now: u64) -> Option<Group> {
        loop {
            let (at, _) = self.first(now)?;
            let class = &mut self.classes[at];
            let of = class.number;
            let ((last_used, _), candidate) = class.queue.pop_first()?;
            match class.queue.first_key_value() {
                Some(((oldest, _), _)) => class.last_used = *oldest,
                None => drop(self.classes.swap_remove(at)),
            }
            let Some(owner) = candidate.upgrade() else {
                continue;
            };
            self.looks += 1;
            let Some(group) = owner.clone().group() else {
                owner.unlist();
                continue;
            };
            let is_tiny = group.bytes < self.added_bytes / self.added / TINY;
            if group.is_held || is_tiny && self.added > FEW {
                self.held.push(candidate);
                continue;
            }
            let staleness = staleness(now, group.last_used);
            let next = self.first(now).map_or(f64::INFINITY, |(_, score)| score);
            // A storage at more than four times the next one's price is not the cheapest: its exact
            // cost is not computed.
            let enough_ns = 4.0 * worth(&group) * (next * staleness).max(least_price(of));
            let price = self.cost_ns(&group.members, enough_ns) / worth(&group);
            let is_right = class_of(price) <= of && group.last_used <= last_used;
            if is_right || price <= next * staleness {
                owner.unlist();
                return Some(group);
            }
            self.put(&owner, &group, price);
        }
    }

    /// Nanoseconds to bring these tensors back, with their evicted inputs; if that is more than
    /// `enough_ns`, any number above `enough_ns`.
    fn cost_ns(&mut self, nodes: &[Arc<dyn AnyEntry>], enough_ns: f64) -> f64 {
        static SEARCHES: AtomicU32 = AtomicU32::new(1);
        let search = SEARCHES.fetch_add(1, Ordering::Relaxed);
        let evicted = &mut self.evicted;
        let (mut cost_ns, mut next) = (0.0, 0);
        while next < nodes.len() + evicted.len().min(INPUTS) && cost_ns <= enough_ns {
            let node = match nodes.get(next) {
                Some(node) => node.clone(),
                None => evicted[next - nodes.len()].clone(),
            };
            cost_ns += f64::from(node.cost_ns());
            node.sources(search, evicted);
            next += 1;
        }
        evicted.clear();
        cost_ns
    }

    /// Begins a search for the operation with this number: storages held for another operation are
    /// candidates again.
    pub fn begin(&mut self, operation: u64) {
        if std::mem::replace(&mut self.searched_for, operation) != operation {
            self.release();
        }
    }

    /// Makes the held storages candidates again. Returns whether there were any.
    pub fn release(&mut self) -> bool {
        let held = std::mem::take(&mut self.held);
        let alive = held.iter().filter_map(Weak::upgrade);
        alive.for_each(|owner| self.add(owner));
        !held.is_empty()
    }

    /// The index of the class with the least price over staleness, and this score; of equal ones
    /// that of the least price.
    fn first(&self, now: u64) -> Option<(usize, f64)> {
        let (mut least, mut least_staleness, mut first) = (f64::INFINITY, 1.0, None);
        for (at, class) in self.classes.iter().enumerate() {
            let (price, staleness) = (least_price(class.number), staleness(now, class.last_used));
            // Compares price over staleness without a division. Both products are exact.
            let (own, other) = (price * least_staleness, least * staleness);
            if own < other || own == other && price < least {
                (least, least_staleness, first) = (price, staleness, Some(at));
            }
        }
        first.map(|at| (at, least / least_staleness))
    }

    /// Removes dropped nodes.
    fn tidy(&mut self) {
        self.classes.retain_mut(|class| {
            class.queue.retain(|_, owner| owner.strong_count() > 0);
            let oldest = class.queue.keys().next();
            class.last_used = oldest.map_or(0, |(oldest, _)| *oldest);
            !class.queue.is_empty()
        });
        let count = self.classes.iter().map(|class| class.queue.len()).sum();
        self.tidy_at = self.added + LEAST.max(count) as u64;
    }
}

fn class_of(price: f64) -> u64 {
    (price.to_bits() >> PRICE_SHIFT).clamp(LOWEST, HIGHEST)
}

fn least_price(class: u64) -> f64 {
    f64::from_bits(class << PRICE_SHIFT)
}

/// Its bytes, divided by how often they are needed, as far as is known.
fn worth(group: &Group) -> f64 {
    let demand = if !group.has_users {
        BRANCH_POINT_DEMAND
    } else if group.overwrites {
        WRITTEN_DEMAND
    } else {
        1.0
    };
    group.bytes.max(1) as f64 / (demand * f64::from(1 + group.restores))
}

fn staleness(now: u64, last_used: u64) -> f64 {
    // Signed numbers are converted in one instruction.
    (now.saturating_sub(last_used).max(1) as i64) as f64
}
