//! What backward will ask the host for, and in which order.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::node::AnyEntry;

/// So many tensors are uploaded before they are asked for: the next transfer overlaps with what runs on the last one, and memory holds
/// little that is not needed yet.
const AHEAD: usize = 2;

/// The place of a host copy in the order in which a thread's tensors were made: the number of the operation, and a number that no other
/// copy has.
pub(crate) type Place = (u64, u64);

/// The host copies of one thread's tensors on one device.
///
/// Backward asks for them from the last place to the first, across scopes. When one is asked for, those before it are uploaded
/// ahead, so the chain goes on whether a tensor was ahead or not.
#[derive(Default)]
pub(crate) struct Line(Mutex<Places>);

#[derive(Default)]
struct Places {
    copies: u64,
    waiting: BTreeMap<Place, Weak<dyn AnyEntry>>,
    ahead: Vec<(Place, Weak<dyn AnyEntry>)>,
    /// What had not arrived on the host when it was looked at last, in order.
    underway: VecDeque<Weak<dyn AnyEntry>>,
}

impl Line {
    /// The place of a new copy of what the operation of this number made.
    pub fn place(&self, operation: u64) -> Place {
        let mut places = self.0.lock();
        places.copies += 1;
        (operation, places.copies)
    }

    /// Adds a copy that has been started, while its node is locked.
    pub fn add(&self, place: Place, node: Weak<dyn AnyEntry>, arrived: bool) {
        let mut places = self.0.lock();
        places.waiting.insert(place, node.clone());
        if !arrived {
            places.underway.push_back(node);
        }
    }

    /// Looks whether copies have arrived, in their order.
    pub fn look_at_arrivals(&self) {
        while let Some(first) = {
            let places = self.0.lock();
            places.underway.front().cloned()
        } {
            if first.upgrade().is_some_and(|node| !node.has_arrived()) {
                return;
            }
            let mut places = self.0.lock();
            if places
                .underway
                .front()
                .is_some_and(|now| now.ptr_eq(&first))
            {
                places.underway.pop_front();
            }
        }
    }

    /// Removes a copy that is gone.
    pub fn forget(&self, place: Place) {
        let mut places = self.0.lock();
        places.waiting.remove(&place);
        places.ahead.retain(|(ahead, _)| *ahead != place);
    }

    /// The copy at this place was asked for: it leaves the line, and those that come next are uploaded ahead. Others that were
    /// uploaded for another order go back.
    pub fn asked_for(&self, place: Place) {
        self.forget(place);
        let (next, others) = self.next(place);
        for (_, node) in &others {
            if let Some(node) = node.upgrade() {
                node.fall_back();
            }
        }
        for (place, node) in next {
            if node.go_ahead() {
                let mut places = self.0.lock();
                if !places.ahead.iter().any(|(ahead, _)| *ahead == place) {
                    places.ahead.push((place, Arc::downgrade(&node)));
                }
            }
        }
    }

    /// What comes next after a place, and what is ahead but does not.
    #[expect(clippy::type_complexity, reason = "both ends of one look at the line")]
    fn next(
        &self,
        place: Place,
    ) -> (
        Vec<(Place, Arc<dyn AnyEntry>)>,
        Vec<(Place, Weak<dyn AnyEntry>)>,
    ) {
        let mut places = self.0.lock();
        let before = places.waiting.range(..place).rev();
        let alive = before.filter_map(|(place, node)| Some((*place, node.upgrade()?)));
        let next: Vec<_> = alive.take(AHEAD).collect();
        let is_next = |place: &Place| next.iter().any(|(next, _)| next == place);
        let others = places.ahead.extract_if(.., |(ahead, _)| !is_next(ahead));
        let others = others.collect();
        (next, others)
    }
}
