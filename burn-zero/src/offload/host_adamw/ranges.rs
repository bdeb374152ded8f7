//! Which elements a step has updated.

use std::ops::Range;

/// Disjoint ranges, ascending, never adjacent.
#[derive(Debug, Default)]
pub(super) struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// Adds `range`, or returns a range that overlaps with it. An empty range adds nothing.
    pub(super) fn insert(&mut self, range: Range<usize>) -> Result<(), Range<usize>> {
        if range.is_empty() {
            return Ok(());
        }
        let next = self.0.partition_point(|known| known.end <= range.start);
        if let Some(known) = self.0.get(next).filter(|known| known.start < range.end) {
            return Err(known.clone());
        }
        self.0.insert(next, range);
        self.join(next);
        if next > 0 {
            self.join(next - 1);
        }
        Ok(())
    }

    /// Joins the range at `index` with the next one if they touch.
    fn join(&mut self, index: usize) {
        if let Some(next) = self.0.get(index + 1)
            && self.0[index].end == next.start
        {
            self.0[index].end = next.end;
            self.0.remove(index + 1);
        }
    }

    /// The first elements of `0..len` that are in no range.
    pub(super) fn first_gap(&self, len: usize) -> Option<Range<usize>> {
        let start = match self.0.first() {
            Some(first) if first.start == 0 => first.end,
            _ => 0,
        };
        let after = self.0.iter().find(|known| known.start > start);
        let end = after.map_or(len, |known| known.start);
        (start < end).then_some(start..end)
    }

    /// Elements in all ranges.
    pub(super) fn total(&self) -> usize {
        self.0.iter().map(Range::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn touching_ranges_become_one_and_overlaps_are_refused() {
        let mut ranges = Ranges::default();
        for range in [4..6, 0..2, 8..10, 2..4] {
            ranges.insert(range).unwrap();
        }
        assert_eq!(ranges.0, [0..6, 8..10]);
        assert_eq!(ranges.insert(5..7), Err(0..6));
        assert_eq!(ranges.insert(7..9), Err(8..10));
        assert_eq!(ranges.first_gap(10), Some(6..8));
        assert_eq!(ranges.first_gap(12), Some(6..8));
        ranges.insert(6..8).unwrap();
        assert_eq!(ranges.first_gap(10), None);
        assert_eq!(ranges.first_gap(12), Some(10..12));
    }

    proptest! {
        #[test]
        fn ranges_are_the_set_of_their_elements(inserts in prop::collection::vec((0usize..40, 0usize..8), 0..30)) {
            let mut ranges = Ranges::default();
            let mut set = [false; 48];
            for (start, len) in inserts {
                let elements = start..start + len;
                let overlaps = set[elements.clone()].contains(&true);
                prop_assert_eq!(ranges.insert(elements.clone()).is_err(), overlaps);
                if !overlaps {
                    set[elements].fill(true);
                }
                let first = set.iter().position(|known| !known);
                prop_assert_eq!(ranges.first_gap(48).map(|gap| gap.start), first);
                prop_assert_eq!(ranges.total(), set.iter().filter(|known| **known).count());
            }
        }
    }
}
