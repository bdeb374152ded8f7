//! Saving: each rank writes its file, then a rename makes the record complete.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Instant;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};

use super::directory::{Disk, Listing, MANIFEST, RecordName, SyncedFile, lock, rank_file};
use super::entry::{Entry, TensorSlice};
use super::joint::JointWork;
use super::manifest::{CHUNK_BYTES, FileRow, Manifest, RankTable, SliceRow, TensorRow};
use super::{RecordError, TrainingState};
use crate::ProcessGroup;

/// The key of the safetensors metadata with the file's [`identity`].
pub(super) const IDENTITY: &str = "burn-zero";

/// How many records stay in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All of them.
    All,
    /// The last ones, this one included.
    Last(NonZeroUsize),
}

impl Default for Keep {
    /// The last two, so that there is another if the last is damaged.
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

/// Saves the state of all ranks as one record in `dir`, a directory of records, made if it does not exist. Collective:
/// every rank calls it, with the slices that it alone holds and the state that is common to all.
///
/// The record becomes visible when it is complete, before this returns: each rank writes its file into a temporary directory
/// and syncs it; then rank 0 checks that every element of every tensor is in exactly one file, writes
/// the manifest and renames the directory. A crash or a full disk before that leaves earlier
/// records unchanged. Records beyond `keep` are removed afterwards, and all ranks wait for that.
///
/// `entries` are written one after the other; lazy ones need memory for one at a time. State is written as JSON
/// ([`TrainingState`]). A lazy entry must be read within the group's deadline, as must each single operation on the disk end;
/// writing a record and removing old ones may take longer. Only one job may save into a directory at a time. The directory must be on a
/// file system that all ranks share.
///
/// ```
/// use burn_zero::record::{Dtype, Entry, Keep, TensorSlice, TensorSpec, TrainingState};
/// use burn_zero::{GroupOptions, ProcessGroup, SingleRank, ThreadGroup, load_sharded, save_sharded};
///
/// # let root = tempfile::tempdir()?;
/// # let dir = root.path();
/// let weight = TensorSpec::new("model/weight", Dtype::F32, [2, 3]);
/// // Two ranks have three elements each.
/// let saved = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
///     let first = group.rank() * 3;
///     let slice = TensorSlice::new(weight.clone(), first..first + 3);
///     let bytes = [group.rank() as f32; 3].map(f32::to_le_bytes).concat();
///     save_sharded(dir, &group, vec![Entry::new(slice, bytes)], TrainingState::at_step(100), Keep::default())
/// })?;
/// assert!(saved.iter().all(Result::is_ok));
///
/// // One rank wants all of them.
/// let mut loaded = Vec::new();
/// let wanted = [TensorSlice::whole(weight)];
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
    save_on(Disk::PLAIN, dir, group, entries, state, keep)
}

/// [`save_sharded`] on a file system.
pub(super) fn save_on(
    disk: Disk,
    dir: &Path,
    group: &dyn ProcessGroup,
    entries: Vec<Entry>,
    state: TrainingState,
    keep: Keep,
) -> Result<Saved, RecordError> {
    let start = Instant::now();
    let mut draft = None;
    let mut work = JointWork::new(group, "begin a record");
    let begun = entries.iter().try_for_each(Entry::check).and_then(|()| {
        if group.rank() == 0 {
            let removed = || drop(work.at_work());
            draft = Some(Draft::begin(disk, dir, state.step, removed)?);
        }
        Ok(draft.as_ref().map(|draft| draft.name))
    });
    let saved = work.share(begun).and_then(|names| {
        let name = names.into_iter().flatten().next();
        let name = name.expect("rank 0 began the record if all agree");
        let mut work = JointWork::new(group, "write a record");
        let partial = dir.join(name.partial());
        let written = write_rank_file(disk, &partial, group, entries, state, || work.at_work());
        let tables = work.share(written)?;

        let mut work = JointWork::new(group, "complete a record");
        let saved = draft.as_ref().map(|draft| {
            let saved = draft.commit(tables)?;
            let path = saved.path.display();
            log::info!("saved {path}: {}", rate(start, saved.bytes));
            draft.remove_surplus(keep, || drop(work.at_work()));
            Ok(saved)
        });
        work.share(saved.transpose())
    });
    saved
        .map(|saved| {
            let saved = saved.into_iter().flatten().next();
            saved.expect("rank 0 completed the record if all agree")
        })
        .inspect_err(|_| {
            // If removal fails, the next save tries again. The other ranks wait for it, unless the group is lost.
            let mut work = JointWork::new(group, "remove an unfinished record");
            if let Some(draft) = &draft {
                disk.remove(&draft.partial(), || drop(work.at_work()));
            }
            drop(work.end(Ok(())));
        })
}

/// Writes and syncs this rank's file in `dir` and returns its description. Calls `at_work` after every chunk, and
/// stops if it fails.
fn write_rank_file(
    disk: Disk,
    dir: &Path,
    group: &dyn ProcessGroup,
    mut entries: Vec<Entry>,
    state: TrainingState,
    mut at_work: impl FnMut() -> Result<(), RecordError>,
) -> Result<RankTable, RecordError> {
    let start = Instant::now();
    let (rank, world_size) = (group.rank(), group.world_size());
    entries.sort_by(|a, b| order(a.slice()).cmp(&order(b.slice())));
    let slices = entries.iter().map(|entry| entry.slice().clone());
    let slices = slices.filter(|slice| !slice.range.is_empty());
    let tensors: Vec<_> = slices
        .map(|slice| (slice_key(&slice), vec![slice.range.len()], slice))
        .collect();
    if let Some(again) = tensors.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        let tensor = &again[0].2.tensor;
        return Err(tensor.error(format!("was given twice: {}", again[0].0)));
    }
    let metadata = (IDENTITY, identity(state.step, rank, world_size));
    let header = safetensors_header(metadata, tensors.into_iter());

    let file = rank_file(rank, world_size);
    let path = dir.join(&file);
    let mut out = SyncedFile::create(disk, &path).map_err(|error| match error {
        RecordError::Io { source, .. } if source.kind() == io::ErrorKind::NotFound => {
            let path = dir.to_owned();
            RecordError::NotShared { rank, path }
        }
        error => error,
    })?;
    out.write(&header)?;
    let mut tensors = Vec::new();
    for entry in entries {
        let TensorSlice { tensor, range } = entry.slice().clone();
        let mut crc32 = Vec::new();
        for chunk in entry.into_bytes()?.chunks(CHUNK_BYTES) {
            crc32.push(crc32fast::hash(chunk));
            out.write(chunk)?;
            at_work()?;
        }
        let slice = SliceRow {
            rank,
            offset: range.start,
            len: range.len(),
            crc32,
            file_offset: 0,
        };
        let row = TensorRow {
            dtype: tensor.dtype,
            shape: tensor.shape,
            slices: vec![slice],
        };
        tensors.push((tensor.name, row));
    }
    let bytes = out.finish()?;
    disk.sync_dir(dir)?;
    log::debug!("{}: {}", path.display(), rate(start, bytes));
    let file = FileRow {
        file,
        bytes,
        header_crc32: crc32fast::hash(&header),
        header_bytes: header.len() as u64,
    };
    Ok(RankTable {
        file,
        state,
        tensors,
    })
}

/// The order of safetensors: the widest elements first, so that all are aligned.
fn order(slice: &TensorSlice) -> (Reverse<Dtype>, &str, usize) {
    let tensor = &slice.tensor;
    (Reverse(tensor.dtype), &tensor.name, slice.range.start)
}

/// The text in a rank's file that identifies its record and rank.
pub(super) fn identity(step: u64, rank: usize, world_size: usize) -> String {
    format!("step {step}, rank {rank} of {world_size}")
}

/// Name of a slice in its file, such as `model/weight[100..150]`.
fn slice_key(slice: &TensorSlice) -> String {
    let TensorSlice { tensor, range } = slice;
    format!("{}[{}..{}]", tensor.name, range.start, range.end)
}

/// Length and text of a safetensors header for contiguous tensors, each with its name, shape and slice; padded so that the first
/// tensor is aligned.
///
/// # Panics
///
/// If a name occurs twice.
pub(super) fn safetensors_header(
    (key, value): (&str, String),
    tensors: impl Iterator<Item = (String, Vec<usize>, TensorSlice)>,
) -> Vec<u8> {
    let mut offset = 0;
    let infos = tensors.map(|(name, shape, slice)| {
        let start = offset;
        offset += slice.bytes();
        let info = TensorInfo {
            dtype: slice.tensor.dtype,
            shape,
            data_offsets: (start, offset),
        };
        (name, info)
    });
    let metadata = HashMap::from([(key.to_owned(), value)]);
    let metadata = Metadata::new(Some(metadata), infos.collect());
    let metadata = metadata.expect("the tensors follow each other");
    let mut text = serde_json::to_vec(&metadata).expect("strings and integers are JSON");
    text.resize(text.len().next_multiple_of(size_of::<u64>()), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// A record that rank 0 has begun.
struct Draft<'a> {
    disk: Disk<'a>,
    dir: &'a Path,
    name: RecordName,
    /// Earlier complete records, oldest first.
    earlier: Vec<RecordName>,
    /// Keeps other jobs from saving until it is dropped.
    _lock: File,
}

impl<'a> Draft<'a> {
    /// Removes unfinished records, calling `removed` after each file, and makes the temporary directory.
    fn begin(
        disk: Disk<'a>,
        dir: &'a Path,
        step: u64,
        mut removed: impl FnMut(),
    ) -> Result<Self, RecordError> {
        disk.make_dirs(dir)?;
        let lock = lock(dir)?;
        let listing = Listing::read(dir)?;
        for stale in &listing.partial {
            log::info!("{} was not finished: removed", stale.complete());
            disk.remove(&dir.join(stale.partial()), &mut removed);
        }
        let number = listing.next_number();
        let draft = Self {
            disk,
            dir,
            name: RecordName { number, step },
            earlier: listing.complete,
            _lock: lock,
        };
        let partial = draft.partial();
        disk.run("make", &partial, || fs::create_dir(&partial))?;
        Ok(draft)
    }

    fn partial(&self) -> PathBuf {
        self.dir.join(self.name.partial())
    }

    /// Makes a record of the files. It exists from the rename on.
    fn commit(&self, tables: Vec<RankTable>) -> Result<Saved, RecordError> {
        let partial = self.partial();
        let manifest = Manifest::assemble(tables)?;
        manifest.check_lengths(&partial)?;
        let path = partial.join(MANIFEST);
        let mut file = SyncedFile::create(self.disk, &path)?;
        file.write(manifest.to_json().as_bytes())?;
        file.finish()?;
        self.disk.sync_dir(&partial)?;

        let complete = self.dir.join(self.name.complete());
        let rename = || fs::rename(&partial, &complete);
        self.disk.run("rename", &partial, rename)?;
        self.disk.sync_dir(self.dir)?;
        Ok(Saved {
            path: complete,
            bytes: manifest.bytes(),
        })
    }

    /// Removes surplus records after this one is complete, calling `removed` after each file.
    fn remove_surplus(&self, keep: Keep, mut removed: impl FnMut()) {
        let Keep::Last(records) = keep else { return };
        let surplus = (self.earlier.len() + 1).saturating_sub(records.get());
        for old in &self.earlier[..surplus] {
            // Renamed first, so that a partly removed record never has a complete one's name.
            let complete = self.dir.join(old.complete());
            let partial = self.dir.join(old.partial());
            let rename = || fs::rename(&complete, &partial);
            match self.disk.run("rename", &complete, rename) {
                Ok(()) => self.disk.remove(&partial, &mut removed),
                Err(error) => log::warn!("{error}"),
            }
        }
    }
}

/// Bytes and seconds as text for the log.
pub(super) fn rate(start: Instant, bytes: u64) -> String {
    let seconds = start.elapsed().as_secs_f64();
    let megabytes = bytes as f64 / 1e6;
    // Avoids a division by zero.
    let rate = megabytes / seconds.max(1e-9);
    format!("{megabytes:.1} MB in {seconds:.2} s ({rate:.0} MB/s)")
}
