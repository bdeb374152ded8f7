//! Saving: every rank its part, then one rename that makes them a record.

use std::fs::{self, File, TryLockError};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::agree::Together;
use super::assemble::PartTable;
use super::entry::Entry;
use super::error::io_error;
use super::layout::{LOCK, Listing, MANIFEST, RecordName};
use super::manifest::{Manifest, check_lengths};
use super::part::{PartFile, PartId, write_part};
use super::report::Rate;
use super::storage::{Disk, Storage, parent};
use super::{RecordError, TrainingState};
use crate::ProcessGroup;

/// How many records stay in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All of them.
    All,
    /// The last so many, this one included.
    Last(NonZeroUsize),
}

impl Default for Keep {
    /// The last two: one to go back to if the last turns out to be damaged.
    fn default() -> Self {
        Self::Last(NonZeroUsize::MIN.saturating_add(1))
    }
}

/// A record that was saved.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Saved {
    /// Its directory.
    pub path: PathBuf,
    /// Bytes of all files of all ranks, without the manifest.
    pub bytes: u64,
}

/// Saves what all ranks hold as one record in `dir`, a directory of records that is made if it is not there. Collective:
/// every rank calls it, with the pieces that it alone holds and the state that all have.
///
/// The record is complete when this returns, and no sooner visible: each rank writes its part into a temporary directory
/// and waits until it is on the disk; then rank 0 checks that every element of every tensor is in exactly one part, writes
/// the manifest and renames the directory. Whatever ends the ranks before that, or fills the disk, leaves the earlier
/// records as they are. Older ones than `keep` says are removed afterwards, and
/// all ranks wait for that.
///
/// `entries` are written one after the other; lazy ones need memory for one at a time. State goes as JSON
/// ([`TrainingState`]). A lazy entry has to arrive within the group's deadline, and so does each single operation on the disk; writing
/// a record and removing old ones may take longer. One job saves into a directory at a time. The directory is on a file system that
/// all ranks share.
///
/// ```
/// use burn_zero::record::{Dtype, Entry, Keep, Piece, TensorSpec, TrainingState};
/// use burn_zero::{GroupOptions, ProcessGroup, SingleRank, ThreadGroup, load_sharded, save_sharded};
///
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path();
/// let weight = TensorSpec::new("model/weight", Dtype::F32, [2, 3]);
/// // Two ranks have three elements each.
/// let saved = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let first = group.rank() * 3;
///     let piece = Piece::new(weight.clone(), first..first + 3);
///     let bytes = [group.rank() as f32; 3].map(f32::to_le_bytes).concat();
///     save_sharded(dir, &group, vec![Entry::new(piece, bytes)], TrainingState::at_step(100), Keep::default())
/// })?;
/// assert!(saved.iter().all(Result::is_ok));
///
/// // One rank wants all of them.
/// let mut loaded = Vec::new();
/// let wanted = [Piece::whole(weight)];
/// let state = load_sharded(dir, &SingleRank::new(), None, &wanted, |_, bytes| {
///     loaded = bytes;
///     Ok(())
/// })?;
/// assert_eq!(state.step, 100);
/// assert_eq!(loaded, [0.0_f32, 0.0, 0.0, 1.0, 1.0, 1.0].map(f32::to_le_bytes).concat());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Costs one write of the rank's bytes and a checksum over them, three collectives of a few bytes an entry, and the disk's
/// sync. The procedure is that of PyTorch's `torch.distributed.checkpoint` with a file a rank.
///
/// # Errors
///
/// On all ranks if on one: [`RecordError::OtherRank`] on those that did not fail themselves. What was written is removed.
pub fn save_sharded(
    dir: &Path,
    group: &dyn ProcessGroup,
    entries: Vec<Entry>,
    state: TrainingState,
    keep: Keep,
) -> Result<Saved, RecordError> {
    save_to(&Disk, dir, group, entries, state, keep)
}

pub(super) fn save_to(
    storage: &dyn Storage,
    dir: &Path,
    group: &dyn ProcessGroup,
    entries: Vec<Entry>,
    state: TrainingState,
    keep: Keep,
) -> Result<Saved, RecordError> {
    let start = Instant::now();
    let id = PartId {
        step: state.step,
        rank: group.rank(),
        world_size: group.world_size(),
    };
    let mut opening = None;
    let checked = entries.iter().try_for_each(Entry::check);
    let mut beginning = Together::new(group, "begin a record");
    let opened = checked.and_then(|()| {
        if id.rank == 0 {
            let removed = || drop(beginning.at_work());
            opening = Some(Opening::new(storage, dir, id.step, removed)?);
        }
        Ok(opening.as_ref().map(|opening| opening.name))
    });
    let name = match beginning.end(opened) {
        Ok(names) => names.into_iter().flatten().next(),
        Err(error) => return Err(abandon(group, opening, error)),
    };
    let name = name.expect("rank 0 opened the record if all agree");

    let partial = dir.join(name.partial());
    let mut writing = Together::new(group, "write a record");
    let at_work = || writing.at_work();
    let table = write_table(storage, &partial, id, entries, state, at_work);
    let saved = writing.end(table).and_then(|tables| {
        let mut completing = Together::new(group, "complete a record");
        let saved = match &opening {
            Some(opening) => opening.commit(tables).map(|saved| {
                let rate = Rate::since(start, saved.bytes);
                log::info!("saved {}: {rate}", saved.path.display());
                opening.retain(keep, || drop(completing.at_work()));
                Some(saved)
            }),
            None => Ok(None),
        };
        completing.end(saved)
    });
    match saved {
        Ok(saved) => {
            let saved = saved.into_iter().flatten().next();
            Ok(saved.expect("rank 0 completed the record if all agree"))
        }
        Err(error) => Err(abandon(group, opening, error)),
    }
}

/// Writes this rank's part and says what is in it.
fn write_table(
    storage: &dyn Storage,
    partial: &Path,
    id: PartId,
    entries: Vec<Entry>,
    state: TrainingState,
    at_work: impl FnMut() -> Result<(), RecordError>,
) -> Result<PartTable, RecordError> {
    let start = Instant::now();
    let (part, pieces) = write_part(storage, partial, id, entries, at_work)?;
    storage
        .sync_dir(partial)
        .map_err(io_error("sync", partial))?;
    let rate = Rate::since(start, part.bytes);
    log::debug!("{} of {}: {rate}", part.file, partial.display());
    let (state, generator) = state.split();
    Ok(PartTable {
        part,
        state,
        generator,
        pieces,
    })
}

/// Removes what rank 0 began, as far as it can: the next save tries again. The others wait for it, if there is still a group.
fn abandon(group: &dyn ProcessGroup, opening: Option<Opening>, error: RecordError) -> RecordError {
    let mut removing = Together::new(group, "remove an unfinished record");
    if let Some(opening) = opening {
        let removed = || drop(removing.at_work());
        remove(opening.storage, &opening.partial(), removed);
    }
    // What ended the save is the error, whatever becomes of the group.
    drop(removing.end(Ok(())));
    error
}

/// What is left behind costs space, but no record. A record may be hundreds of files of any size: `removed` is called after each.
fn remove(storage: &dyn Storage, path: &Path, mut removed: impl FnMut()) {
    let mut files = || {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if !entry.file_type()?.is_dir() {
                storage.remove_file(&entry.path())?;
                removed();
            }
        }
        storage.remove_dir(path)
    };
    match files() {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            log::warn!("cannot remove {}: {error}", path.display());
        }
        _ => {}
    }
    removed();
}

/// A record that rank 0 has begun.
struct Opening<'a> {
    storage: &'a dyn Storage,
    dir: &'a Path,
    name: RecordName,
    /// Complete records that were there before, oldest first.
    earlier: Vec<RecordName>,
    /// Keeps other jobs out until it is dropped.
    _lock: File,
}

impl<'a> Opening<'a> {
    /// `removed` is called between the files of unfinished records.
    fn new(
        storage: &'a dyn Storage,
        dir: &'a Path,
        step: u64,
        mut removed: impl FnMut(),
    ) -> Result<Self, RecordError> {
        make_dirs(storage, dir)?;
        let lock = lock(dir)?;
        let listing = Listing::read(dir)?;
        for stale in &listing.partial {
            log::info!("{} was not finished: removed", stale.complete());
            remove(storage, &dir.join(stale.partial()), &mut removed);
        }
        let number = listing.next_number();
        let opening = Self {
            storage,
            dir,
            name: RecordName { number, step },
            earlier: listing.complete,
            _lock: lock,
        };
        let partial = opening.partial();
        let made = storage.create_dir(&partial);
        made.map_err(io_error("make", &partial))?;
        Ok(opening)
    }

    fn partial(&self) -> PathBuf {
        self.dir.join(self.name.partial())
    }

    /// Makes a record of the parts. Its rename is the moment from which on it exists.
    fn commit(&self, tables: Vec<PartTable>) -> Result<Saved, RecordError> {
        let (storage, partial) = (self.storage, self.partial());
        let manifest = Manifest::assemble(tables)?;
        check_lengths(&partial, &manifest)?;
        let path = partial.join(MANIFEST);
        let created = storage.create_file(&path);
        let mut file = PartFile::new(&path, created.map_err(io_error("create", &path))?);
        file.write(manifest.to_json().as_bytes())?;
        file.finish()?;
        let synced = storage.sync_dir(&partial);
        synced.map_err(io_error("sync", &partial))?;

        let complete = self.dir.join(self.name.complete());
        let renamed = storage.rename(&partial, &complete);
        renamed.map_err(io_error("rename", &partial))?;
        let synced = storage.sync_dir(self.dir);
        synced.map_err(io_error("sync", self.dir))?;
        Ok(Saved {
            path: complete,
            bytes: manifest.bytes(),
        })
    }

    /// Removes the records that are not to be kept, after this one is complete. `removed` is called between their files.
    fn retain(&self, keep: Keep, mut removed: impl FnMut()) {
        let Keep::Last(records) = keep else { return };
        let surplus = (self.earlier.len() + 1).saturating_sub(records.get());
        for old in &self.earlier[..surplus.min(self.earlier.len())] {
            // Renamed first: half of a record must never bear a complete one's name.
            let complete = self.dir.join(old.complete());
            let partial = self.dir.join(old.partial());
            match self.storage.rename(&complete, &partial) {
                Ok(()) => remove(self.storage, &partial, &mut removed),
                Err(error) => log::warn!("cannot remove {}: {error}", complete.display()),
            }
        }
    }
}

/// Makes `dir` and what it is in, each on the disk before the next.
fn make_dirs(storage: &dyn Storage, dir: &Path) -> Result<(), RecordError> {
    // Where the program runs has no parent that could be made, even if someone removed it.
    if dir.is_dir() || dir == Path::new(".") {
        return Ok(());
    }
    let parent = parent(dir);
    make_dirs(storage, parent)?;
    storage.create_dir(dir).map_err(io_error("make", dir))?;
    let synced = storage.sync_dir(parent);
    synced.map_err(io_error("sync", parent))
}

/// Keeps other processes from saving into `dir`; the operating system lets go if this one dies.
fn lock(dir: &Path) -> Result<File, RecordError> {
    let path = dir.join(LOCK);
    let opened = fs::OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path);
    let file = opened.map_err(io_error("open", &path))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(RecordError::Busy {
                dir: dir.to_owned(),
            });
        }
        // Some network file systems have no locks.
        Err(TryLockError::Error(error)) => log::warn!("cannot lock {}: {error}", path.display()),
    }
    Ok(file)
}
