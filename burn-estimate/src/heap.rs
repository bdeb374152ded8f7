//! The heap of a process, which returns memory to the system and requests it again: the system
//! clears each page at its first use, which takes longer than most operations on it.
//!
//! Follows glibc 2.36's `malloc`. A request takes the free block that fits it best. Free memory at
//! the heap's end is returned to the system if it is twice the threshold or more. A request for
//! which the heap would have to grow gets a block outside the heap if it is larger than the
//! threshold, and that block is returned when it is freed. The threshold is the size of the largest
//! such block, up to 32 MiB. Blocks smaller than tensors are not counted.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocator::Allocator;

/// Free bytes at the heap's end that the process keeps when the heap shrinks, and gets in addition
/// when it grows.
const PAD: u64 = 128 << 10;
/// The threshold at first.
const LEAST: u64 = 128 << 10;
/// The threshold at most.
const MOST: u64 = 32 << 20;
/// A free block smaller than this does not cause a check of the heap's end.
const LOOK: u64 = 64 << 10;

/// A heap.
pub(crate) struct Heap {
    threshold: u64,
    /// The sizes of free blocks inside, by address.
    free: BTreeMap<u64, u64>,
    /// Size and address of the same blocks.
    by_size: BTreeSet<(u64, u64)>,
    /// The end of the last block.
    top: u64,
    /// The end of the memory that the process has for the heap.
    end: u64,
    now: u64,
    /// When the process got memory from the system in this step, and how many bytes.
    fresh: Vec<(u64, u64)>,
}

/// A block inside the heap, or one directly from the system.
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
        // The threshold rises to the block's size.
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
