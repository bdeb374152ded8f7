//! Which block of the model runs at a time.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use crate::ledger::Recording;

use super::events::{Events, Repeat};

/// The order in which a pass goes through the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Ascending,
    Descending,
}

/// A pass through the blocks: forward, backward, a norm of all gradients, the optimizer.
#[derive(Clone, Debug)]
pub(super) struct Pass {
    /// When it begins.
    pub start: u64,
    /// The time that each block takes.
    pub length: u64,
    /// Blocks that are alike.
    pub count: u64,
    pub order: Order,
    /// The block that it begins with.
    pub first: i64,
}

/// A time in a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub pass: usize,
    pub block: i64,
    /// Since the pass has begun with the block.
    pub offset: u64,
}

impl Pass {
    /// The blocks that are alike.
    pub fn blocks(&self) -> RangeInclusive<i64> {
        let last = self.block(self.count - 1);
        self.first.min(last)..=self.first.max(last)
    }

    /// When it begins with a block that is one of them.
    pub fn begins(&self, block: i64) -> u64 {
        let nth = match self.order {
            Order::Ascending => block - self.first,
            Order::Descending => self.first - block,
        };
        self.start + nth as u64 * self.length
    }

    fn block(&self, nth: u64) -> i64 {
        match self.order {
            Order::Ascending => self.first + nth as i64,
            Order::Descending => self.first - nth as i64,
        }
    }
}

/// The passes of a step, in their order.
pub(super) struct Passes(pub Vec<Pass>);

/// A storage that is allocated in one pass, and freed in another one.
struct Link {
    allocated: Turn,
    freed: Turn,
}

/// A block of a pass, by the order in which the pass goes through them.
#[derive(Clone, Copy)]
struct Turn {
    pass: usize,
    nth: u64,
}

impl Passes {
    /// The passes of repeats, with their blocks numbered so that a storage is freed in the block
    /// in which it was allocated, as most are. `None` without any.
    pub fn new(recording: &Recording, events: &Events, repeats: &[Repeat]) -> Option<Self> {
        let pass = |repeat: &Repeat| {
            let (start, length) = events.times(repeat);
            Pass {
                start,
                length,
                count: repeat.count as u64,
                order: Order::Ascending,
                first: 0,
            }
        };
        let mut passes = Self(repeats.iter().map(pass).collect());
        let links: Vec<_> = recording
            .storages
            .iter()
            .filter_map(|storage| {
                let allocated = passes.nth(storage.born)?;
                let freed = passes.nth(storage.died)?;
                (allocated.pass != freed.pass).then_some(Link { allocated, freed })
            })
            .collect();
        let count = passes.0.len();
        // The passes without numbers.
        let mut unknown: Vec<_> = (0..count).rev().collect();
        while let Some(next) = unknown.pop() {
            // No storage links it to those before, but for the first one.
            let mut known = vec![next];
            while let Some(from) = known.pop() {
                unknown.retain(|&to| match passes.order_after(from, to, &links) {
                    Some((order, first)) => {
                        (passes.0[to].order, passes.0[to].first) = (order, first);
                        known.push(to);
                        false
                    }
                    None => true,
                });
            }
        }
        (count > 0).then_some(passes)
    }

    /// The order of pass `to` and its first block, by the storages that link it to pass `from`.
    fn order_after(&self, from: usize, to: usize, links: &[Link]) -> Option<(Order, i64)> {
        let mut found: BTreeMap<(bool, i64), usize> = BTreeMap::new();
        for link in links {
            let (one, other) = match (link.allocated, link.freed) {
                (one, other) | (other, one) if (one.pass, other.pass) == (from, to) => (one, other),
                _ => continue,
            };
            let (block, nth) = (self.0[from].block(one.nth), other.nth as i64);
            *found.entry((true, block - nth)).or_default() += 1;
            *found.entry((false, block + nth)).or_default() += 1;
        }
        let ((is_ascending, first), _) = found.into_iter().max_by_key(|(_, times)| *times)?;
        let order = if is_ascending {
            Order::Ascending
        } else {
            Order::Descending
        };
        Some((order, first))
    }

    /// The pass at a time, and how many blocks it has gone through.
    fn nth(&self, at: u64) -> Option<Turn> {
        let pass = self.0.partition_point(|pass| pass.start <= at);
        let pass = pass.checked_sub(1)?;
        let Pass {
            start,
            length,
            count,
            ..
        } = self.0[pass];
        let nth = (at - start) / length;
        (nth < count).then_some(Turn { pass, nth })
    }

    /// Where a time is, if it is in a pass.
    pub fn place(&self, at: u64) -> Option<Place> {
        let Turn { pass, nth } = self.nth(at)?;
        let Pass { start, length, .. } = self.0[pass];
        Some(Place {
            pass,
            block: self.0[pass].block(nth),
            offset: at - start - nth * length,
        })
    }

    /// The blocks that have one before and one behind in all passes, the one in the middle first.
    pub fn inner(&self) -> Vec<i64> {
        let blocks = || self.0.iter().map(Pass::blocks);
        let first = blocks().map(|blocks| *blocks.start()).max().unwrap_or(0);
        let last = blocks().map(|blocks| *blocks.end()).min().unwrap_or(0);
        let mut inner: Vec<_> = (first + 1..last).collect();
        inner.sort_by_key(|block| (2 * block - first - last).abs());
        inner
    }
}
