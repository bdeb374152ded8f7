//! Tensors that are so small that a scope keeps them.
//!
//! A module may store what it made in a scope, as batch norm does its running statistics. A vector
//! of one number a channel costs nothing to keep; evicted, it holds all that its recipe refers to,
//! the scope's input too, until the next step reads it and so computes it again.
//!
//! A tensor that other recipes refer to is not kept: replays need the rest of what it was computed
//! from, and bring all of it back together.

use std::ops::RangeInclusive;
use std::sync::Arc;

use crate::node::entry::AnyEntry;

/// A tiny tensor has at most a 16th of the bytes of the scope's largest one, and the tiny ones
/// together, the smallest first, a 16th of all bytes made in the scope.
const PART: u64 = 16;

/// A scope that made fewer bytes is not searched for tiny tensors: they can hold no more than these
/// bytes.
const WORTH: u64 = 16 << 10;

/// Whether handles refer to a tensor, and no recipe does.
pub(crate) fn is_end(node: &Arc<dyn AnyEntry>) -> bool {
    let users = node.info().users as usize;
    // The argument is one more reference.
    users > 0 && Arc::strong_count(node) == users + 1
}

/// The sizes of the storages made in a scope.
#[derive(Default)]
pub(crate) struct Sizes {
    largest: u64,
    all: u64,
}

impl Sizes {
    #[inline]
    pub fn add(&mut self, bytes: u64) {
        self.largest = self.largest.max(bytes);
        self.all += bytes;
    }

    /// The range of sizes that are tiny, given the sizes of the tensors that would be evicted. All
    /// of one size are tiny, or none.
    pub fn tiny(&self, going: impl Iterator<Item = u64>) -> RangeInclusive<u64> {
        let mut tiny = 0;
        if self.all >= WORTH {
            let most = self.largest / PART;
            let mut sizes: Vec<_> = going.filter(|bytes| (1..=most).contains(bytes)).collect();
            sizes.sort_unstable();
            let mut left = self.all / PART;
            for alike in sizes.chunk_by(|a, b| a == b) {
                let bytes = alike.iter().sum::<u64>();
                if bytes > left {
                    break;
                }
                left -= bytes;
                tiny = alike[0];
            }
        }
        1..=tiny
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Up to a 16th of the largest and, together, of all.
    #[test]
    fn up_to_which_size_tensors_are_tiny() {
        const LARGEST: u64 = 16 << 10;
        let model = [vec![1_000; 500], vec![16_000]].concat();
        for (made, most) in [
            (&[][..], 0),
            (&[0, 4], 0),
            (&[256; 1000], 0),
            (&[1600, 16 * 1600 - 1], 0),
            // A small scope has nothing tiny either.
            (&[16, 8 << 10], 0),
            (&[16, 16 << 10], 16),
            (&[LARGEST, LARGEST / 16, LARGEST / 16 + 1], LARGEST / 16),
            (&[LARGEST, 0, 8, 512], 512),
            // All of one size or none: three of 512 are more than a 16th of all.
            (&[LARGEST, 8, 512, 512, 512], 8),
            // The activations of a model beside logits that are far larger.
            (&model, 0),
        ] {
            let mut sizes = Sizes::default();
            made.iter().for_each(|bytes| sizes.add(*bytes));
            assert_eq!(sizes.tiny(made.iter().copied()), 1..=most, "{made:?}");
        }
    }
}
