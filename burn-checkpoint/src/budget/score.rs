//! What an eviction costs.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::node::AnyEntry;

/// The longest chain that is looked at, in operations.
const LONGEST_CHAIN: usize = 512;

/// How often a junction is needed against a tensor with handles: only if something that was made of it is evicted as well. In
/// a GPT of 12 blocks any value from 0.1 to 0.6 replays as much to a tenth, both at 60 % and at 25 % of its bytes; at 0.01, where
/// junctions go first, it is 1.5 times as much at 25 %.
const JUNCTION_DEMAND: f64 = 0.3;

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
    pub fn score(&self, now: u64) -> f64 {
        self.cost_ns() / self.worth(now)
    }

    /// The score if nothing had to come back first: no more than [`Self::score`], and quickly known.
    pub fn least_score(&self, now: u64) -> f64 {
        let own = self.members.iter().map(|node| f64::from(node.cost_ns()));
        own.sum::<f64>() / self.worth(now)
    }

    /// Bytes times staleness, over how often they are needed.
    fn worth(&self, now: u64) -> f64 {
        let staleness = now.saturating_sub(self.last_used).max(1);
        let demand = if self.has_users { 1.0 } else { JUNCTION_DEMAND };
        self.bytes.max(1) as f64 * staleness as f64 / demand
    }

    /// Nanoseconds to bring all members back.
    fn cost_ns(&self) -> f64 {
        let mut seen = FxHashSet::default();
        let mut stack: Vec<_> = self.members.clone();
        let mut cost = 0.0;
        while let Some(node) = stack.pop() {
            if !seen.insert(Arc::as_ptr(&node).cast::<()>() as usize) {
                continue;
            }
            cost += f64::from(node.cost_ns());
            if seen.len() >= LONGEST_CHAIN {
                break;
            }
            node.evicted_inputs(&mut |input| stack.push(input));
        }
        cost
    }
}
