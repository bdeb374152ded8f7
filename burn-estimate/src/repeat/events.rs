//! The events of a recording in order, and how those of a model with one block more differ.

use std::cmp::Reverse;
use std::hash::{Hash, Hasher};
use std::ops::Range;

use rustc_hash::FxHasher;

use crate::ledger::Recording;

/// What happens at a time: the number of a storage, cost, transfer or phase of the recording. Those
/// of one time are in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    Phase(usize),
    Allocated(usize),
    Cost(usize),
    Transfer(usize),
    Freed(usize),
}

/// Something that happens in a recording.
#[derive(Clone, Copy, Debug)]
struct Event {
    at: u64,
    what: What,
    /// A hash of what it is, and of the time since the event before.
    kind: u64,
    /// A hash of the same and of its sizes.
    exact: u64,
}

/// The events of a recording, in order.
pub(super) struct Events(Vec<Event>);

/// Events that follow each other again and again, one time for each block.
#[derive(Clone, Debug)]
pub(super) struct Repeat {
    /// The first event.
    start: usize,
    /// Events of a block.
    period: usize,
    /// How many times.
    pub count: usize,
}

/// How a recording has grown with a block.
pub(super) struct Growth {
    pub repeats: Vec<Repeat>,
    /// Events of the smaller and the grown recording that differ in size alone.
    resized: Vec<(What, What)>,
    /// Transfers of a block that are all of one time, such as norms that are read together.
    transfers: Vec<usize>,
}

/// Events after a block that have to be those of the other recording.
const AHEAD: usize = 48;

fn hash(value: impl Hash) -> u64 {
    let mut hasher = FxHasher::default();
    value.hash(&mut hasher);
    hasher.finish()
}

impl Events {
    pub fn of(recording: &Recording) -> Self {
        let mut timed: Vec<(u64, What, u64)> = Vec::new();
        for (number, storage) in recording.storages.iter().enumerate() {
            if storage.born > recording.start {
                // Of those allocated at one time, what is freed first is first.
                timed.push((storage.born, What::Allocated(number), storage.died));
            }
            if storage.died != u64::MAX {
                timed.push((storage.died, What::Freed(number), 0));
            }
        }
        let costs = recording.costs.iter().enumerate();
        timed.extend(costs.map(|(number, cost)| (cost.at, What::Cost(number), 0)));
        let transfers = recording.transfers.iter().enumerate();
        timed.extend(transfers.map(|(number, moved)| (moved.at, What::Transfer(number), 0)));
        let phases = recording.phases.iter().enumerate();
        timed.extend(phases.map(|(number, (at, _))| (*at, What::Phase(number), 0)));
        timed.sort_unstable_by_key(|&(at, what, died)| (at, what.order(), died, what));
        let mut before = recording.start;
        let events = timed.into_iter().map(|(at, what, _)| {
            let since = at - before;
            before = at;
            let (kind, sizes) = what.hashes(recording);
            Event {
                at,
                what,
                kind: hash((since, kind)),
                exact: hash((since, kind, sizes)),
            }
        });
        Self(events.collect())
    }

    /// How these events have grown from those of a model with one block less; `None` if the two
    /// differ in another way.
    pub fn grown_from(&self, smaller: &Self) -> Option<Growth> {
        let (mine, other) = (&self.0, &smaller.0);
        let (mut at, mut at_other) = (0, 0);
        let mut growth = Growth {
            repeats: Vec::new(),
            resized: Vec::new(),
            transfers: Vec::new(),
        };
        // Where the block that was inserted last ends.
        let mut inserted_until = 0;
        while at < mine.len() || at_other < other.len() {
            let (rest, rest_other) = (&mine[at..], &other[at_other..]);
            let same = same_events(rest, rest_other);
            if same > 0 {
                (at, at_other) = (at + same, at_other + same);
            } else if let Some(period) = self.inserted(inserted_until..at, rest_other) {
                let ends = at + period;
                let block = &rest[..period];
                if let Some(transfers) = only_transfers(block) {
                    growth.transfers.extend(transfers);
                } else if !are_freed(block) {
                    let repeat = self.repeat(inserted_until, ends, period)?;
                    growth.repeats.push(repeat);
                }
                (at, inserted_until) = (ends, ends);
            } else if are_alike(rest, rest_other) {
                growth.resized.push((rest_other[0].what, rest[0].what));
                (at, at_other) = (at + 1, at_other + 1);
            } else {
                return None;
            }
        }
        Some(growth)
    }

    /// The number of events of a block that is inserted behind these events, so that `other`
    /// follows: they are those before once more.
    fn inserted(&self, before: Range<usize>, other: &[Event]) -> Option<usize> {
        let rest = &self.0[before.end..];
        let most = rest.len().checked_sub(other.len())?;
        let least = if other.len() < AHEAD { most } else { 1 };
        let is_again = |period: usize| {
            let block = &rest[..period];
            let block_before = &self.0[before.end - period..before.end];
            are_exactly(block, block_before) && are_alike(&rest[period..], other)
        };
        let periods = least.max(1)..=most.min(before.len());
        // A period that is too short soon differs in sizes.
        let follows = |period: &usize| same_events(&rest[*period..], other);
        periods
            .filter(|&period| is_again(period))
            .max_by_key(|period| (follows(period), Reverse(*period)))
    }

    /// The blocks that end with the event `ends`, none of them before `begin`. A block begins at a
    /// time at which no other one ends.
    fn repeat(&self, begin: usize, ends: usize, period: usize) -> Option<Repeat> {
        let mut start = ends - period;
        while start >= begin + period
            && are_exactly(
                &self.0[start - period..start],
                &self.0[start..start + period],
            )
        {
            start -= period;
        }
        let is_apart = |start: &usize| self.0[*start].at > self.time_before(*start);
        let rotated = (start..start + period).find(is_apart)?;
        Some(Repeat {
            start: rotated,
            period,
            count: (ends - rotated) / period,
        })
    }

    fn time_before(&self, event: usize) -> u64 {
        let before = event.checked_sub(1).map(|before| self.0[before].at);
        before.unwrap_or(0)
    }

    /// When the first block of a repeat begins, and the time that each takes.
    pub fn times(&self, repeat: &Repeat) -> (u64, u64) {
        let begins = |block: usize| self.time_before(repeat.start + block * repeat.period) + 1;
        (begins(0), begins(1) - begins(0))
    }

    /// Resizes what grows with each block, such as the concatenation of one number for each
    /// parameter.
    pub fn grow(&self, growth: &Growth, smaller: &Recording, grown: &mut Recording, more: u64) {
        let linear = |to: &mut u64, from: u64| *to += more * to.saturating_sub(from);
        for &transfer in &growth.transfers {
            let transfer = &mut grown.transfers[transfer];
            transfer.uploaded_bytes *= 1 + more;
            transfer.downloaded_bytes *= 1 + more;
        }
        for resized in &growth.resized {
            match *resized {
                (What::Allocated(from), What::Allocated(to)) => {
                    let from = smaller.storages[from].bytes;
                    linear(&mut grown.storages[to].bytes, from);
                }
                (What::Cost(from), What::Cost(to)) => {
                    let (from, to) = (&smaller.costs[from], &mut grown.costs[to]);
                    linear(&mut to.bytes, from.bytes);
                    linear(&mut to.flops, from.flops);
                    linear(&mut to.functions, from.functions);
                    linear(&mut to.reordered, from.reordered);
                }
                (What::Transfer(from), What::Transfer(to)) => {
                    let (from, to) = (&smaller.transfers[from], &mut grown.transfers[to]);
                    linear(&mut to.uploaded_bytes, from.uploaded_bytes);
                    linear(&mut to.downloaded_bytes, from.downloaded_bytes);
                }
                _ => {}
            }
        }
    }
}

fn are_exactly(some: &[Event], others: &[Event]) -> bool {
    same_events(some, others) == some.len()
}

/// The transfers, if nothing else happens and all are of one time.
fn only_transfers(events: &[Event]) -> Option<Vec<usize>> {
    let mut pairs = events.iter().zip(&events[1..]);
    if pairs.any(|(event, next)| event.at != next.at) {
        return None;
    }
    let transfers = events.iter().map(|event| match event.what {
        What::Transfer(number) => Some(number),
        _ => None,
    });
    transfers.collect()
}

/// Whether nothing happens but that storages are freed. Those that are freed together may be of
/// several passes.
fn are_freed(events: &[Event]) -> bool {
    let mut events = events.iter();
    events.all(|event| matches!(event.what, What::Freed(_)))
}

/// How many of the next events are the same.
fn same_events(some: &[Event], others: &[Event]) -> usize {
    let pairs = some.iter().zip(others);
    let same = pairs.take_while(|(one, other)| one.exact == other.exact);
    same.count()
}

/// Whether the next events are the same but for their sizes.
fn are_alike(some: &[Event], others: &[Event]) -> bool {
    let mut pairs = some.iter().zip(others).take(AHEAD);
    let both_end = some.len() == others.len() || some.len().min(others.len()) >= AHEAD;
    both_end && pairs.all(|(one, other)| one.kind == other.kind)
}

impl What {
    fn order(self) -> u8 {
        match self {
            Self::Phase(_) => 0,
            Self::Allocated(_) => 1,
            Self::Cost(_) => 2,
            Self::Transfer(_) => 3,
            Self::Freed(_) => 4,
        }
    }

    /// Hashes of what it is, and of its sizes.
    fn hashes(self, recording: &Recording) -> (u64, u64) {
        match self {
            Self::Phase(number) => (hash((self.order(), recording.phases[number].1 as u8)), 0),
            Self::Allocated(number) | Self::Freed(number) => {
                let storage = &recording.storages[number];
                let kind = (self.order(), storage.row.name, storage.is_mask);
                (hash(kind), storage.bytes)
            }
            Self::Cost(number) => {
                let cost = &recording.costs[number];
                let kind = (self.order(), cost.is_half, cost.recorder);
                let sizes = (cost.bytes, cost.flops, cost.functions, cost.reordered);
                (hash(kind), hash(sizes))
            }
            Self::Transfer(number) => {
                let moved = &recording.transfers[number];
                let sizes = (moved.uploaded_bytes, moved.downloaded_bytes);
                (hash(self.order()), hash(sizes))
            }
        }
    }
}
