//! A block of a recording, once more and once more.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use burn_decorator::repeated_block;
use rustc_hash::FxHashMap;

use crate::ledger::{Cost, Recording, Storage, Transfer, Use};

use super::passes::{Order, Passes, Place};

/// Copies of a block that is like those beside it.
pub(super) struct Copies<'a> {
    recording: &'a Recording,
    passes: &'a Passes,
    /// The block that is copied.
    middle: i64,
    /// How many times.
    more: i64,
    /// The number in a parameter's name minus that of its block.
    name_offset: i64,
    /// When each pass comes to the block that is copied.
    begins: Vec<u64>,
    /// New names, by the address of the old one and the new number.
    renamed: RefCell<FxHashMap<(usize, i64), Arc<str>>>,
    /// By the address of the new name.
    upcoming: RefCell<FxHashMap<usize, Upcoming>>,
}

/// See [`Storage::next`].
type Upcoming = Arc<OnceLock<Arc<str>>>;

/// Blocks between two events of a storage, at most; what is held longer is of no block, such as a
/// mask that the first one makes and the last one frees.
const NEAR: i64 = 2;

/// A storage of a block.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Life {
    row: &'static str,
    bytes: u64,
    allocated: Option<Near>,
    freed: Option<Near>,
}

/// When something happens, relative to a block.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Near {
    pass: usize,
    blocks: i64,
    offset: u64,
}

impl<'a> Copies<'a> {
    /// Copies of a block that is like the one before and the one behind. `None` if there is no such
    /// block, or it has other storages than the `grown` ones of a block.
    pub fn new(
        recording: &'a Recording,
        passes: &'a Passes,
        grown: usize,
        more: usize,
    ) -> Option<Self> {
        let of_block = |middle| Self {
            recording,
            passes,
            middle,
            more: more as i64,
            name_offset: 0,
            begins: Vec::new(),
            renamed: RefCell::default(),
            upcoming: RefCell::default(),
        };
        let mut blocks = passes.inner().into_iter().map(of_block);
        let mut this = blocks.find(|copies| copies.are_alike(grown))?;
        this.name_offset = this.name_offset();
        for pass in &passes.0 {
            let begins = pass.begins(this.middle);
            let added = match pass.order {
                Order::Ascending => 0,
                // The copies run first.
                Order::Descending => more as u64 * pass.length,
            };
            // Passes before have their copies already.
            this.begins.push(this.later(begins - 1) + 1 + added);
        }
        Some(this)
    }

    /// Whether the block and those beside it have the same storages, as many as this.
    fn are_alike(&self, grown: usize) -> bool {
        let Some(lives) = self.lives(self.middle) else {
            return false;
        };
        let mut beside = [self.middle - 1, self.middle + 1].into_iter();
        lives.len() == grown && beside.all(|block| self.lives(block).as_ref() == Some(&lives))
    }

    /// The number in a parameter's name minus that of its block, as most storages of the first pass
    /// have it.
    fn name_offset(&self) -> i64 {
        let mut found: FxHashMap<i64, usize> = FxHashMap::default();
        for storage in &self.recording.storages {
            let place = self.passes.place(storage.born);
            let number = storage.owner.as_deref().and_then(number);
            if let (Some(Place { pass: 0, block, .. }), Some(number)) = (place, number) {
                *found.entry(number - block).or_default() += 1;
            }
        }
        let most = found.into_iter().max_by_key(|(_, times)| *times);
        most.map_or(0, |(offset, _)| offset)
    }

    /// The block of a storage, if it is of one: where it is allocated, or else where it is freed.
    /// What outlives the step is of the block that used it last.
    fn block(&self, storage: &Storage) -> Option<i64> {
        let outlives = storage.born <= self.recording.start && storage.died == u64::MAX;
        let ends = if outlives {
            storage.last_touched
        } else {
            storage.died
        };
        let place = self.passes.place(storage.born);
        let place = place.or_else(|| self.passes.place(ends));
        place.map(|place| place.block)
    }

    /// The storages of a block. `None` if one is allocated or freed far from it.
    fn lives(&self, block: i64) -> Option<Vec<Life>> {
        let near = |at| match self.passes.place(at) {
            None => Some(None),
            Some(place) => {
                let blocks = place.block - block;
                let near = Near {
                    pass: place.pass,
                    blocks,
                    offset: place.offset,
                };
                (blocks.abs() <= NEAR).then_some(Some(near))
            }
        };
        let storages = self.recording.storages.iter();
        let lives = storages
            .filter(|storage| self.block(storage) == Some(block))
            .map(|storage| {
                Some(Life {
                    row: storage.row.name,
                    bytes: storage.bytes,
                    allocated: near(storage.born)?,
                    freed: near(storage.died)?,
                })
            });
        let mut lives = lives.collect::<Option<Vec<_>>>()?;
        lives.sort_unstable();
        Some(lives)
    }

    /// When the event of a time is, with the copies of all passes before.
    fn later(&self, at: u64) -> u64 {
        let passes = &self.passes.0[..self.begins.len()];
        let added = passes.iter().map(|pass| {
            let begins = pass.begins(self.middle);
            let copies_begin = match pass.order {
                Order::Ascending => begins + pass.length,
                Order::Descending => begins,
            };
            if at >= copies_begin {
                self.more as u64 * pass.length
            } else {
                0
            }
        });
        at + added.sum::<u64>()
    }

    /// When the event of a place is in another block, by the numbers of the deep model's.
    fn at(&self, Place { pass, offset, .. }: Place, block: i64) -> u64 {
        let begins = self.begins[pass] + offset;
        let away = block - self.middle;
        let length = self.passes.0[pass].length as i64;
        let shift = match self.passes.0[pass].order {
            Order::Ascending => away * length,
            Order::Descending => -away * length,
        };
        begins.strict_add_signed(shift)
    }

    /// The number of a block in the deep model.
    fn deep(&self, block: i64) -> i64 {
        if block > self.middle {
            block + self.more
        } else {
            block
        }
    }

    /// When an event of a storage is, whose block becomes another one.
    fn moved(&self, at: u64, becomes: Option<(i64, i64)>) -> u64 {
        if at == u64::MAX {
            return at;
        }
        let near = becomes.and_then(|(block, deep)| {
            let place = self.passes.place(at)?;
            let away = place.block - block;
            let last = self.deep(*self.passes.0[place.pass].blocks().end());
            let first = *self.passes.0[place.pass].blocks().start();
            let is_near = away.abs() <= NEAR && (first..=last).contains(&(deep + away));
            is_near.then(|| self.at(place, deep + away))
        });
        near.unwrap_or_else(|| self.later(at))
    }

    /// A storage in the deep model, where its block, if it has one, becomes another.
    fn storage(&self, storage: &Storage, becomes: Option<(i64, i64)>) -> Storage {
        let moved = |at| self.moved(at, becomes);
        let named = |name: &Arc<str>| self.renamed(name, becomes);
        let mut uses: Vec<_> = storage
            .uses
            .iter()
            .map(|used| self.used(used, moved))
            .collect();
        if becomes.is_none() {
            let copied = storage.uses.iter().flat_map(|used| {
                let place = self.passes.place(used.during.start);
                let place = place.filter(|place| place.block == self.middle);
                let copies = self.copies().filter(move |_| place.is_some());
                copies.map(move |copy| {
                    let becomes = Some((self.middle, copy));
                    self.used(used, |at| self.moved(at, becomes))
                })
            });
            uses.extend(copied);
            uses.sort_by_key(|used| used.during.start);
        }
        let mut deep = storage.clone();
        deep.uses = uses;
        (deep.born, deep.died) = (moved(storage.born), moved(storage.died));
        deep.last_used = moved(storage.last_used);
        deep.last_touched = moved(storage.last_touched);
        deep.cast_from = storage.cast_from.map(moved);
        deep.owner = storage.owner.as_ref().map(named);
        deep.parameter = storage.parameter.as_ref().map(named);
        deep.next = self.upcoming(&storage.next, becomes);
        if let Some(source) = &mut deep.source {
            source.parameter = named(&source.parameter);
        }
        deep
    }

    fn used(&self, used: &Use, moved: impl Fn(u64) -> u64) -> Use {
        let Range { start, end } = used.during;
        let begins = moved(start);
        Use {
            during: begins..begins + (end - start),
            ..used.clone()
        }
    }

    /// The numbers of the copies.
    fn copies(&self) -> Range<i64> {
        self.middle + 1..self.middle + 1 + self.more
    }

    /// A parameter's name where its block becomes another, or that of the deep model.
    fn renamed(&self, name: &Arc<str>, becomes: Option<(i64, i64)>) -> Arc<str> {
        let Some(number) = number(name) else {
            return name.clone();
        };
        let becomes = becomes.map(|(block, deep)| number + deep - block);
        let becomes =
            becomes.unwrap_or_else(|| self.deep(number - self.name_offset) + self.name_offset);
        if becomes == number {
            return name.clone();
        }
        let mut renamed = self.renamed.borrow_mut();
        let renamed = renamed.entry((address(name), becomes));
        let new = renamed.or_insert_with(|| {
            let block = repeated_block(name);
            let before = block.trim_end_matches(|digit: char| digit.is_ascii_digit());
            format!("{before}{becomes}{}", &name[block.len()..]).into()
        });
        new.clone()
    }

    fn upcoming(&self, upcoming: &Upcoming, becomes: Option<(i64, i64)>) -> Upcoming {
        let Some(name) = upcoming.get() else {
            return upcoming.clone();
        };
        let renamed = self.renamed(name, becomes);
        if Arc::ptr_eq(&renamed, name) {
            return upcoming.clone();
        }
        let mut known = self.upcoming.borrow_mut();
        let known = known.entry(address(&renamed));
        known.or_insert_with(|| Arc::new(renamed.into())).clone()
    }

    /// The times of the copies of an event, if it is one of the block that is copied.
    fn times(&self, at: u64) -> impl Iterator<Item = u64> {
        let place = self.passes.place(at);
        let place = place.filter(|place| place.block == self.middle);
        place
            .into_iter()
            .flat_map(move |place| self.copies().map(move |copy| self.at(place, copy)))
    }

    /// The recording of the deep model: first what the recording has, in its order.
    pub fn recording(&self) -> Recording {
        let recording = self.recording;
        let of_middle = |storage: &&Storage| self.block(storage) == Some(self.middle);
        let copied: Vec<_> = recording.storages.iter().filter(of_middle).collect();
        let mut storages =
            Vec::with_capacity(recording.storages.len() + copied.len() * self.more as usize);
        storages.extend(recording.storages.iter().map(|storage| {
            let block = self.block(storage);
            self.storage(storage, block.map(|block| (block, self.deep(block))))
        }));
        for storage in copied {
            let copies = self.copies();
            storages.extend(copies.map(|copy| self.storage(storage, Some((self.middle, copy)))));
        }
        let mut costs = recording.costs.clone();
        let mut transfers = recording.transfers.clone();
        let mut phases = recording.phases.clone();
        costs
            .iter_mut()
            .for_each(|cost| cost.at = self.later(cost.at));
        transfers
            .iter_mut()
            .for_each(|moved| moved.at = self.later(moved.at));
        phases.iter_mut().for_each(|(at, _)| *at = self.later(*at));
        for cost in &recording.costs {
            costs.extend(self.times(cost.at).map(|at| Cost { at, ..*cost }));
        }
        for moved in &recording.transfers {
            let copies = self.times(moved.at);
            transfers.extend(copies.map(|at| Transfer { at, ..*moved }));
        }
        for &(at, phase) in &recording.phases {
            phases.extend(self.times(at).map(|at| (at, phase)));
        }
        phases.sort_by_key(|(at, _)| *at);
        Recording {
            start: recording.start,
            trained_bytes: recording.trained_bytes,
            storages,
            phases,
            costs,
            transfers,
        }
    }
}

/// The address of a name: those of a recording last as long as it does.
fn address(name: &Arc<str>) -> usize {
    Arc::as_ptr(name).cast::<u8>() as usize
}

/// The number of the block in a parameter's name.
fn number(name: &str) -> Option<i64> {
    let block = repeated_block(name);
    block.rsplit('.').next()?.parse().ok()
}
