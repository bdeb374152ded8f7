//! The allocations of a recorded step, repeated on the model of an allocator.

use std::collections::BTreeMap;

use crate::classes::Classes;
use crate::shares::Shares;

/// A model of an allocator.
pub(crate) trait Allocator {
    /// A block of memory that it has allocated.
    type Block: Copy;

    /// Allocates `bytes`; `None` if that is impossible.
    fn allocate(&mut self, bytes: u64) -> Option<Self::Block>;

    /// Frees a block.
    fn free(&mut self, block: Self::Block);

    /// Called whenever the step begins again.
    fn begin(&mut self) {}

    /// Sets the time, by the clock of the recording.
    fn now(&mut self, _at: u64) {}
}

impl Classes<'_> {
    /// Repeats the step's allocations on an allocator a few times, until its state is that in later
    /// steps. `None` if it cannot allocate.
    ///
    /// Parameters are taken to be allocated one after the other.
    pub fn allocate_in<A: Allocator>(&self, shares: &Shares, allocator: &mut A) -> Option<()> {
        let recording = self.recording;
        let spans = recording.storages.iter().flat_map(|storage| {
            let kind = self.kind(storage);
            self.spans(storage, kind, shares)
        });
        let mut spans: Vec<_> = spans.filter(|(_, bytes)| *bytes > 0).collect();
        // Sorted, so that each run is the same: storages come in the order of a hash map.
        spans.sort_unstable_by_key(|(during, bytes)| (during.start, during.end, *bytes));
        let starts = spans.iter().enumerate().filter_map(|(span, (during, _))| {
            (during.start > recording.start).then_some((during.start, span))
        });
        let ends = spans.iter().enumerate();
        let ends = ends.filter_map(|(span, (during, _))| {
            (during.end < u64::MAX).then_some((during.end, span))
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort_unstable();
        // At the same time, blocks are freed before others are allocated.
        let mut ends = ends.into_iter().peekable();
        let mut changes = Vec::with_capacity(2 * spans.len());
        for (start, span) in starts {
            while let Some((end, freed)) = ends.next_if(|(end, _)| *end <= start) {
                changes.push((end, false, freed));
            }
            changes.push((start, true, span));
        }
        changes.extend(ends.map(|(end, freed)| (end, false, freed)));

        let mut blocks: Vec<Option<A::Block>> = vec![None; spans.len()];
        // Blocks that are alive when a step ends are alive when the next one begins.
        let mut alive: BTreeMap<u64, Vec<A::Block>> = BTreeMap::new();
        const STEPS: usize = 3;
        for _ in 0..STEPS {
            allocator.begin();
            for (span, (during, bytes)) in spans.iter().enumerate() {
                if during.start <= recording.start {
                    let known = alive.get_mut(bytes).and_then(Vec::pop);
                    let block = known.map_or_else(|| allocator.allocate(*bytes), Some)?;
                    blocks[span] = Some(block);
                }
            }
            for block in std::mem::take(&mut alive).into_values().flatten() {
                allocator.free(block);
            }
            for &(at, is_new, span) in &changes {
                allocator.now(at);
                if is_new {
                    blocks[span] = Some(allocator.allocate(spans[span].1)?);
                } else if let Some(block) = blocks[span].take() {
                    allocator.free(block);
                }
            }
            for ((_, bytes), block) in spans.iter().zip(&mut blocks) {
                if let Some(block) = block.take() {
                    alive.entry(*bytes).or_default().push(block);
                }
            }
        }
        Some(())
    }
}
