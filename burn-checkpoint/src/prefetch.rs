//! Which host copies backward will use, and in which order: the next ones are uploaded before their use.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Weak;

use parking_lot::Mutex;

use crate::entry::AnyEntry;

/// Number of tensors uploaded before their use: the next transfer overlaps with the operations on the last tensor, and memory holds
/// little that is not needed yet.
const AHEAD: usize = 2;

/// The position of a host copy in the order in which a thread's tensors were made: the number of the operation, and a number that no other
/// copy has.
pub(crate) type Position = (u64, u64);

/// The host copies of one thread's tensors on one device.
///
/// Backward uses them from the last position to the first, across scopes. At each use the copies at the positions before it are uploaded
/// ahead, whether the used copy was uploaded ahead or not.
#[derive(Default)]
pub(crate) struct Prefetch(Mutex<Queue>);

#[derive(Default)]
struct Queue {
    copies: u64,
    waiting: BTreeMap<Position, Weak<dyn AnyEntry>>,
    /// Copies that were uploaded before their use.
    ahead: BTreeSet<Position>,
    /// Copies that were under way at the last poll, in order.
    underway: VecDeque<Weak<dyn AnyEntry>>,
}

impl Prefetch {
    /// The position of a new copy of the result of the operation with this number.
    pub fn position(&self, operation: u64) -> Position {
        let mut queue = self.0.lock();
        queue.copies += 1;
        (operation, queue.copies)
    }

    /// Adds a copy that has been started, while its node is locked.
    pub fn add(&self, position: Position, node: Weak<dyn AnyEntry>, arrived: bool) {
        let mut queue = self.0.lock();
        queue.waiting.insert(position, node.clone());
        if !arrived {
            queue.underway.push_back(node);
        }
    }

    /// Checks whether reads are over, in their order.
    pub fn poll(&self) {
        while let Some(first) = {
            let queue = self.0.lock();
            queue.underway.front().cloned()
        } {
            if first.upgrade().is_some_and(|node| !node.is_read()) {
                return;
            }
            let mut queue = self.0.lock();
            if queue.underway.front().is_some_and(|now| now.ptr_eq(&first)) {
                queue.underway.pop_front();
            }
        }
    }

    /// Removes a copy that was dropped or used.
    pub fn forget(&self, position: Position) {
        let mut queue = self.0.lock();
        queue.waiting.remove(&position);
        queue.ahead.remove(&position);
    }

    /// Called when the copy at this position is used: removes it from the queue, and uploads the next copies ahead. What was uploaded for
    /// another order waits for its use.
    pub fn asked_for(&self, position: Position) {
        self.forget(position);
        let mut queue = self.0.lock();
        let free = AHEAD.saturating_sub(queue.ahead.len());
        let before = queue.waiting.range(..position).rev();
        let waiting = before.filter(|(position, _)| !queue.ahead.contains(position));
        let alive = waiting.filter_map(|(position, node)| Some((*position, node.upgrade()?)));
        let next: Vec<_> = alive.take(free).collect();
        queue
            .ahead
            .extend(next.iter().map(|(position, _)| *position));
        drop(queue);
        for (position, node) in next {
            if !node.prefetch() {
                self.0.lock().ahead.remove(&position);
            }
        }
    }
}
