//! The evictions of a step, which the next step repeats without searches.
//!
//! A training step is the same program each time. Where a step has run the same operations as the one before, with as many live bytes, a
//! search for as much room evicts the same tensors. The first search that differs ends the repetition until the next step.

/// So many evictions and searches of a step are remembered: some MiB. What comes after them in a step is not repeated.
const MOST: usize = 1 << 20;

/// The searches of the last step.
#[derive(Default)]
pub(super) struct Memo {
    searches: Vec<Search>,
    /// The places of the evicted nodes, search after search, less the last place before their step.
    evicted: Vec<u64>,
    /// The last place before this step.
    before: u64,
    /// How many of the searches this step has repeated.
    repeated: usize,
    /// Whether this step has made the same searches as the one before so far.
    repeats: bool,
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
        // It may have made fewer searches than the step before.
        self.differs();
        self.before = before;
        self.repeated = 0;
        self.repeats = !self.searches.is_empty();
    }

    pub fn repeats(&self) -> bool {
        self.repeats
    }

    /// If the step before has made a search with this key at this point: the places of what it has evicted, and whether that made the room.
    pub fn repeat(&mut self, key: u64) -> Option<(impl Iterator<Item = u64>, bool)> {
        let search = self.searches.get(self.repeated).filter(|_| self.repeats)?;
        if search.key != key {
            return None;
        }
        let (begin, search) = (self.end_of(self.repeated), *search);
        self.repeated += 1;
        let places = self.evicted[begin..search.end].iter();
        let places = places.map(|place| place.wrapping_add(self.before));
        Some((places, search.made_room))
    }

    /// The end of the evictions of so many searches.
    fn end_of(&self, searches: usize) -> usize {
        let last = searches.checked_sub(1).map(|last| self.searches[last]);
        last.unwrap_or_default().end
    }

    /// From here on the step differs from the one before.
    pub fn differs(&mut self) {
        if std::mem::take(&mut self.repeats) {
            self.evicted.truncate(self.end_of(self.repeated));
            self.searches.truncate(self.repeated);
        }
    }

    /// Remembers that a search under way has evicted the node at this place.
    pub fn evicts(&mut self, place: u64) {
        if self.evicted.len() < MOST {
            self.evicted.push(place.wrapping_sub(self.before));
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
