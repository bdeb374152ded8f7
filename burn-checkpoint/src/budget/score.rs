//! What an eviction costs.

use std::sync::Arc;

use rustc_hash::FxHashSet;

use crate::node::AnyEntry;

/// The longest chain that is looked at, in operations.
const LONGEST_CHAIN: usize = 512;

/// Tensors that share a storage: it is freed when all of them are evicted.
pub(super) struct Group {
    pub members: Vec<Arc<dyn AnyEntry>>,
    pub bytes: u64,
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

    /// Bytes times staleness.
    fn worth(&self, now: u64) -> f64 {
        let staleness = now.saturating_sub(self.last_used).max(1);
        self.bytes.max(1) as f64 * staleness as f64
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
