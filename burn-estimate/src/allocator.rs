//! The allocations of a step once more, given to another allocator.

use std::collections::BTreeMap;

use crate::classes::Classes;
use crate::estimate::Estimate;

/// What gives out memory.
pub(crate) trait Allocator {
    /// Memory that it gave.
    type Block: Copy;

    /// Memory of so many bytes; `None` if there can be none.
    fn allocate(&mut self, bytes: u64) -> Option<Self::Block>;

    /// Takes it back.
    fn free(&mut self, block: Self::Block);

    /// The step begins, once more.
    fn begin(&mut self) {}

    /// The time of the recording.
    fn now(&mut self, _at: u64) {}
}

impl Estimate {
    /// Has an allocator give out the memory of the step a few times, until it is what later steps meet. `None` if it cannot.
    ///
    /// Parameters are taken to be allocated one after the other.
    pub(crate) fn allocate_in<A: Allocator>(&self, allocator: &mut A) -> Option<()> {
        let recording = &self.recording;
        let classes = Classes::new(recording);
        let spans = recording.storages.iter().flat_map(|storage| {
            let kind = classes.kind(storage);
            classes.spans(storage, kind, &self.shares)
        });
        let mut spans: Vec<_> = spans.filter(|(_, bytes)| *bytes > 0).collect();
        // The same in each run: storages come in the order of a hash map.
        spans.sort_unstable_by_key(|(during, bytes)| (during.start, during.end, *bytes));
        let mut changes = Vec::new();
        for (span, (during, _)) in spans.iter().enumerate() {
            changes.extend((during.start > recording.start).then_some((during.start, true, span)));
            changes.extend((during.end < u64::MAX).then_some((during.end, false, span)));
        }
        // At one time memory is freed before other is allocated.
        changes.sort_unstable();

        let mut blocks: BTreeMap<usize, A::Block> = BTreeMap::new();
        // What is alive when a step ends begins the next one.
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
