//! Which host copies backward will use, and in which order: the next ones are uploaded before their
//! use.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Weak;

use parking_lot::Mutex;

use crate::node::entry::AnyEntry;

/// Number of tensors uploaded before their use: the next transfer overlaps with operations, and
/// memory holds little that is not needed yet.
const AHEAD: usize = 2;

/// The host copies of one thread's tensors on one device, by the numbers of their nodes.
///
/// Backward uses them from the last number to the first, across scopes. At each use the copies
/// before it are uploaded ahead.
#[derive(Default)]
pub(crate) struct Prefetch(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    waiting: BTreeMap<u64, Weak<dyn AnyEntry>>,
    /// Copies that were uploaded before their use.
    ahead: BTreeSet<u64>,
}

impl Prefetch {
    /// Adds a copy that has been started, while its node is locked.
    pub fn add(&self, id: u64, node: Weak<dyn AnyEntry>) {
        self.0.lock().waiting.insert(id, node);
    }

    /// Removes a copy that was dropped or used.
    pub fn forget(&self, id: u64) {
        let mut queue = self.0.lock();
        queue.waiting.remove(&id);
        queue.ahead.remove(&id);
    }

    /// This node's copy is used: removes it, and uploads the next ones ahead. What was uploaded for
    /// another order waits for its use.
    pub fn asked_for(&self, id: u64) {
        self.forget(id);
        let mut queue = self.0.lock();
        let free = AHEAD.saturating_sub(queue.ahead.len());
        let before = queue.waiting.range(..id).rev();
        let waiting = before.filter(|(id, _)| !queue.ahead.contains(id));
        let alive = waiting.filter_map(|(id, node)| Some((*id, node.upgrade()?)));
        let next: Vec<_> = alive.take(free).collect();
        queue.ahead.extend(next.iter().map(|(id, _)| *id));
        drop(queue);
        for (id, node) in next {
            if !node.prefetch() {
                self.0.lock().ahead.remove(&id);
            }
        }
    }
}
