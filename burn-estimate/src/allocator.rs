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
        let mut changes = Vec::new();
        for (span, (during, _)) in spans.iter().enumerate() {
            changes.extend((during.start > recording.start).then_some((during.start, true, span)));
            changes.extend((during.end < u64::MAX).then_some((during.end, false, span)));
        }
        // At the same time, blocks are freed before others are allocated.
        changes.sort_unstable();

        let mut blocks: BTreeMap<usize, A::Block> = BTreeMap::new();
        // Blocks that are alive when a step ends are alive when the next one begins.
        let mut alive: BTreeMap<u64, Vec<A::Block>> = BTreeMap::new();
        const STEPS: usize = 3;
        for _ in 0..STEPS {
            allocator.begin();
            for (span, (during, bytes)) in spans.iter().enumerate() {
                if during.start <= recording.start {
                    let known = alive.get_mut(bytes).and_then(Vec::pop);
                    let block = known.map_or_else(|| allocator.allocate(*bytes), Some)?;
                    blocks.insert(span, block);
                }
            }
            for block in std::mem::take(&mut alive).into_values().flatten() {
                allocator.free(block);
            }
            for &(at, is_new, span) in &changes {
                allocator.now(at);
                if is_new {
                    blocks.insert(span, allocator.allocate(spans[span].1)?);
                } else if let Some(block) = blocks.remove(&span) {
                    allocator.free(block);
                }
            }
            for (span, block) in std::mem::take(&mut blocks) {
                alive.entry(spans[span].1).or_default().push(block);
            }
        }
        Some(())
    }
}
