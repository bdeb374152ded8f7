//! The heap of a process, which gives memory back to the system and gets it anew: at its first use the system clears it, page by page, which takes
//! longer than most operations on it.
//!
//! Follows glibc 2.36's `malloc`: a free block is given to the request that it fits best; what is free at the heap's end goes back to the system from twice
//! the threshold on, and so does at once what is larger than the threshold. That is the size of the largest block so freed, up to 32 MiB. Blocks smaller
//! than tensors, which may lie between these, are not counted.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocator::Allocator;

/// Of the heap's end the system keeps this much for the process, and gives it as much more as is needed.
const PAD: u64 = 128 << 10;
/// The threshold at first.
const LEAST: u64 = 128 << 10;
/// The threshold at most.
const MOST: u64 = 32 << 20;
/// A smaller free block does not have the heap's end looked at.
const LOOK: u64 = 64 << 10;

/// A heap.
pub(crate) struct Heap {
    threshold: u64,
    /// What is free inside, by address.
    free: BTreeMap<u64, u64>,
    /// The same, by size.
    by_size: BTreeSet<(u64, u64)>,
    /// Behind the last block.
    top: u64,
    /// What the process has.
    end: u64,
    now: u64,
    /// When the process got memory in this step, and how many bytes.
    fresh: Vec<(u64, u64)>,
}

/// Memory of the heap, or of the system.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Block {
    Inside { start: u64, bytes: u64 },
    Outside { bytes: u64 },
}

impl Heap {
    pub fn new() -> Self {
        Self {
            threshold: LEAST,
            free: BTreeMap::new(),
            by_size: BTreeSet::new(),
            top: 0,
            end: 0,
            now: 0,
            fresh: Vec::new(),
        }
    }

    /// When the process got memory from the system in the last step, and how many bytes.
    pub fn fresh(&self) -> &[(u64, u64)] {
        &self.fresh
    }

    fn remove(&mut self, start: u64) -> Option<u64> {
        let bytes = self.free.remove(&start)?;
        self.by_size.remove(&(bytes, start));
        Some(bytes)
    }

    fn insert(&mut self, start: u64, bytes: u64) {
        self.free.insert(start, bytes);
        self.by_size.insert((bytes, start));
    }
}

impl Allocator for Heap {
    type Block = Block;

    fn allocate(&mut self, bytes: u64) -> Option<Block> {
        let bytes = bytes.next_multiple_of(64);
        if let Some(&(found, start)) = self.by_size.range((bytes, 0)..).next() {
            self.remove(start);
            if found > bytes {
                self.insert(start + bytes, found - bytes);
            }
            return Some(Block::Inside { start, bytes });
        }
        if self.top + bytes > self.end && bytes > self.threshold {
            self.fresh.push((self.now, bytes));
            return Some(Block::Outside { bytes });
        }
        let start = self.top;
        self.top += bytes;
        if self.top > self.end {
            self.fresh.push((self.now, self.top + PAD - self.end));
            self.end = self.top + PAD;
        }
        Some(Block::Inside { start, bytes })
    }

    fn free(&mut self, block: Block) {
        let (mut start, mut bytes) = match block {
            Block::Inside { start, bytes } => (start, bytes),
            Block::Outside { bytes } => {
                if bytes <= MOST {
                    self.threshold = self.threshold.max(bytes);
                }
                return;
            }
        };
        if let Some(after) = self.remove(start + bytes) {
            bytes += after;
        }
        let before = self.free.range(..start).next_back();
        if let Some((&before, &size)) = before
            && before + size == start
        {
            self.remove(before);
            (start, bytes) = (before, bytes + size);
        }
        if start + bytes < self.top {
            self.insert(start, bytes);
        } else {
            self.top = start;
        }
        let freed = if start < self.top {
            bytes
        } else {
            self.end - start
        };
        if freed >= LOOK && self.end - self.top >= 2 * self.threshold {
            self.end = self.top + PAD;
        }
    }

    fn begin(&mut self) {
        self.fresh.clear();
    }

    fn now(&mut self, at: u64) {
        self.now = at;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    fn fresh(heap: &mut Heap) -> u64 {
        let bytes = heap.fresh.iter().map(|(_, bytes)| bytes).sum();
        heap.fresh.clear();
        bytes
    }

    fn allocate(heap: &mut Heap, bytes: u64) -> Block {
        heap.allocate(bytes).expect("a heap grows")
    }

    #[test]
    fn the_end_goes_back_to_the_system_and_holes_stay() {
        let mut heap = Heap::new();
        // The threshold rises to its size.
        let first = allocate(&mut heap, MIB);
        heap.free(first);
        assert_eq!(fresh(&mut heap), MIB);

        let blocks = [0; 8].map(|_| allocate(&mut heap, MIB));
        assert_eq!(fresh(&mut heap), 8 * MIB + PAD);
        heap.free(blocks[0]);
        assert!(matches!(
            allocate(&mut heap, MIB),
            Block::Inside { start: 0, .. }
        ));
        assert_eq!(fresh(&mut heap), 0);
        blocks[1..].iter().rev().for_each(|block| heap.free(*block));
        let _ = [0; 7].map(|_| allocate(&mut heap, MIB));
        let again = fresh(&mut heap);
        assert!((6 * MIB..=7 * MIB).contains(&again), "{again}");
    }

    #[test]
    fn what_lies_at_the_end_keeps_all_before_it() {
        let mut heap = Heap::new();
        let first = allocate(&mut heap, MIB);
        heap.free(first);
        let blocks = [0; 8].map(|_| allocate(&mut heap, MIB));
        fresh(&mut heap);
        blocks[..7].iter().rev().for_each(|block| heap.free(*block));
        let _ = [0; 7].map(|_| allocate(&mut heap, MIB));
        assert_eq!(fresh(&mut heap), 0);
    }

    #[test]
    fn what_is_very_large_is_fresh_each_time() {
        let mut heap = Heap::new();
        for _ in 0..3 {
            let block = allocate(&mut heap, 40 * MIB);
            heap.free(block);
            assert_eq!(fresh(&mut heap), 40 * MIB);
        }
    }
}
