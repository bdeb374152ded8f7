//! What is so small that a scope keeps it.
//!
//! A module may store what it made in a scope, as batch norm does its running statistics. A vector of one number a channel costs nothing to
//! keep; evicted, it holds all that its recipe refers to, the scope's input too, until the next step reads it and has what leads to it
//! run once more.
//!
//! What other recipes start from is not kept, tiny or not: replays need the rest of what it was computed from anyway, and bring all of
//! it back in one go.

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::entry::AnyEntry;

/// Tiny is what has at most this part of the bytes of the scope's largest tensor, the smallest first, and together at most this part
/// of the bytes of all that was made in the scope.
const PART: u64 = 16;

/// A scope that made less, in bytes, is not looked through: it can hold no more than that.
const WORTH: u64 = 16 << 10;

/// Whether handles refer to a tensor, and no recipe does.
pub(crate) fn is_end(node: &Arc<dyn AnyEntry>) -> bool {
    let users = node.info().users as usize;
    // One more reference is the one that is given.
    users > 0 && Arc::strong_count(node) == users + 1
}

/// How large what was made in a scope is.
pub(crate) struct Sizes {
    smallest: u64,
    largest: u64,
    all: u64,
}

impl Default for Sizes {
    fn default() -> Self {
        Self {
            smallest: u64::MAX,
            largest: 0,
            all: 0,
        }
    }
}

impl Sizes {
    /// Adds a storage of so many bytes.
    #[inline]
    pub fn add(&mut self, bytes: u64) {
        if bytes == 0 {
            return;
        }
        self.smallest = self.smallest.min(bytes);
        self.largest = self.largest.max(bytes);
        self.all += bytes;
    }

    /// The bytes of what is tiny among tensors that would go, of which this gives the bytes. All of one size are, or none.
    pub fn tiny<S: Iterator<Item = u64>>(&self, going: impl FnOnce() -> S) -> RangeInclusive<u64> {
        let most = self.largest / PART;
        let any = self.smallest <= most && self.all >= WORTH;
        1..=if any {
            self.largest_tiny(most, going())
        } else {
            0
        }
    }

    #[cold]
    fn largest_tiny(&self, most: u64, going: impl Iterator<Item = u64>) -> u64 {
        let mut sizes: Vec<_> = going.filter(|bytes| (1..=most).contains(bytes)).collect();
        sizes.sort_unstable();
        let mut left = self.all / PART;
        let mut tiny = 0;
        for alike in sizes.chunk_by(|a, b| a == b) {
            let bytes = alike.iter().sum::<u64>();
            if bytes > left {
                break;
            }
            left -= bytes;
            tiny = alike[0];
        }
        tiny
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny(made: &[u64]) -> RangeInclusive<u64> {
        let mut sizes = Sizes::default();
        made.iter().for_each(|bytes| sizes.add(*bytes));
        sizes.tiny(|| made.iter().copied())
    }

    #[test]
    fn a_scope_of_tensors_alike_has_nothing_tiny() {
        assert!(tiny(&[]).is_empty());
        assert!(tiny(&[0, 4]).is_empty());
        assert!(tiny(&[256; 1000]).is_empty());
        assert!(tiny(&[1600, 16 * 1600 - 1]).is_empty());
    }

    #[test]
    fn a_small_scope_has_nothing_tiny_either() {
        assert!(tiny(&[16, 8 << 10]).is_empty());
        assert_eq!(tiny(&[16, 16 << 10]), 1..=16);
    }

    #[test]
    fn the_smallest_are_up_to_a_part_of_the_largest_and_of_all() {
        const LARGEST: u64 = 16 << 10;
        assert_eq!(
            tiny(&[LARGEST, LARGEST / 16, LARGEST / 16 + 1]),
            1..=LARGEST / 16
        );
        assert_eq!(tiny(&[LARGEST, 0, 8, 512]), 1..=512);
        // All of one size or none: three of 512 are more than a 16th of all.
        assert_eq!(tiny(&[LARGEST, 8, 512, 512, 512]), 1..=8);
        // The activations of a model beside logits that are far larger: no more than a 16th of all.
        let mut model = vec![1_000; 500];
        model.push(16_000);
        assert!(tiny(&model).is_empty());
    }
}
