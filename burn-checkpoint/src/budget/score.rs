//! What an eviction costs.

use std::sync::Arc;

use super::Neighbours;
use crate::node::AnyEntry;

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
    pub fn score(&self, neighbours: &Neighbours, now: u64) -> f64 {
        neighbours.cost_ns(&self.members) / self.worth(now)
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
}
