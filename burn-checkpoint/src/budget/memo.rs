//! The evictions of a step, which the next step repeats without searches.
//!
//! A training step is the same program each time. Where a step has run the same operations as the
//! one before, with as many live bytes, a search for as much room evicts the same tensors. The
//! first search that differs ends the repetition until the next step.

/// So many evictions and as many searches of a step are remembered: 5 MiB. What comes after them in
/// a step is not repeated.
const MOST: usize = 1 << 17;

/// The searches of the last step.
#[derive(Default)]
pub(super) struct Memo {
    searches: Vec<Search>,
    /// The evicted nodes, search after search.
    evicted: Vec<Place>,
    /// The last place before this step, and the last one before the previous step.
    before: u64,
    earlier: u64,
    /// How many of the searches this step has repeated.
    repeated: usize,
    /// Whether this step has made the same searches as the one before so far.
    pub repeats: bool,
}

/// A node's place among the results of its budget.
#[derive(Clone, Copy)]
enum Place {
    /// Of a node that each step makes, counted from the step's begin. The difference wraps around,
    /// because a step may make nodes before its begin is noticed.
    Relative(u64),
    /// Of a node older than the previous step, whose place is the same in all steps.
    Absolute(u64),
}

/// A search, and what it has evicted.
#[derive(Clone, Copy, Default)]
struct Search {
    key: u64,
    /// The end of its part of `evicted`.
    end: usize,
    /// Whether it has made the room that it was for.
    made_room: bool,
}

impl Memo {
    /// A step begins after the node at this place.
    pub fn begin_step(&mut self, before: u64) {
        // It may have made fewer searches than the step before, or the last one more evictions than
        // are remembered.
        self.differs(false);
        self.evicted.truncate(self.end_of(self.searches.len()));
        self.earlier = std::mem::replace(&mut self.before, before);
        self.repeated = 0;
        self.repeats = !self.searches.is_empty();
    }

    /// If the step before has made a search with this key at this point: the places of what it has
    /// evicted, and whether that made the room.
    pub fn repeat(&mut self, key: u64) -> Option<(impl Iterator<Item = u64>, bool)> {
        let search = self.searches.get(self.repeated).filter(|_| self.repeats)?;
        if search.key != key {
            return None;
        }
        let (begin, search) = (self.end_of(self.repeated), *search);
        self.repeated += 1;
        let places = self.evicted[begin..search.end].iter();
        let before = self.before;
        let places = places.map(move |place| match place {
            Place::Relative(place) => before.wrapping_add(*place),
            Place::Absolute(place) => *place,
        });
        Some((places, search.made_room))
    }

    /// The end of the evictions of so many searches.
    fn end_of(&self, searches: usize) -> usize {
        let last = searches.checked_sub(1).map(|last| self.searches[last]);
        last.unwrap_or_default().end
    }

    /// From here on the step differs from the one before. If the repeated search `goes_on`, it is
    /// remembered anew when it ends, with what it has evicted so far.
    pub fn differs(&mut self, goes_on: bool) {
        if std::mem::take(&mut self.repeats) {
            self.evicted.truncate(self.end_of(self.repeated));
            self.searches.truncate(self.repeated - usize::from(goes_on));
        }
    }

    /// Remembers that a search under way has evicted the node at this place.
    pub fn evicts(&mut self, place: u64) {
        if self.evicted.len() < MOST {
            self.evicted.push(if place > self.earlier {
                Place::Relative(place.wrapping_sub(self.before))
            } else {
                Place::Absolute(place)
            });
        }
    }

    /// Remembers a search that is over.
    pub fn ends(&mut self, key: u64, made_room: bool) {
        if self.evicted.len() < MOST && self.searches.len() < MOST {
            self.searches.push(Search {
                key,
                end: self.evicted.len(),
                made_room,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_falls_short_once_is_repeated_whole() {
        let mut memo = Memo::default();
        memo.begin_step(10);
        memo.evicts(12);
        memo.ends(7, true);

        memo.begin_step(20);
        let (places, made_room) = memo.repeat(7).expect("the same search");
        assert_eq!((places.collect::<Vec<_>>(), made_room), (vec![22], true));
        // It did not make the room: the search goes on, and evicts an old node.
        memo.differs(true);
        assert!(memo.repeat(7).is_none());
        memo.evicts(5);
        memo.ends(7, true);

        memo.begin_step(30);
        let (places, _) = memo.repeat(7).expect("the same search");
        assert_eq!(places.collect::<Vec<_>>(), [32, 5]);
        assert!(memo.repeats);
    }
}
