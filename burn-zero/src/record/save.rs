//! Saving: each rank writes its file, then a rename makes the record complete.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use burn_ranks::ProcessGroup;
use safetensors::Dtype;

use super::directory::{
    Listing, MANIFEST, RecordName, SyncedFile, make_dirs, rank_file, remove, run, sync_dir,
};
use super::entry::{Entry, TensorSlice};
use super::joint::{end, share};
use super::manifest::{HeaderRow, Manifest, RankFile, SliceRow, TensorRow, header, slice_key};
use super::{RecordFault, TrainingState};
use crate::error::ZeroError;

/// How many records stay in a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// All of them.
    All,
    /// This many of the last ones, the new one included.
    Last(NonZeroUsize),
}

impl Default for Keep {
    /// The last two, so that there is another if the last is damaged.
    fn default() -> Self {
        Self::Last(NonZeroUsize::MIN.saturating_add(1))
    }
}

/// A record that was saved.
#[derive(Clone, Debug, PartialEq)]
pub struct Saved {
    /// The directory of the record.
    pub path: PathBuf,
    /// Bytes of all files of all ranks, without the manifest.
    pub bytes: u64,
}

/// Saves the state of all ranks as one record in `dir`, a directory of records, made if it does not
/// exist. Collective: every rank calls it, with the slices that it alone holds and the state that
/// is common to all.
///
/// The record becomes visible when it is complete, before this returns: each rank writes its file
/// into a temporary directory and syncs it; then rank 0 checks that every element of every tensor
/// is in exactly one file, writes the manifest and renames the directory. A crash or a full disk
/// before that leaves earlier records unchanged. Records beyond `keep` are removed afterwards, and
/// all ranks wait for that.
///
/// `entries` are written one after the other; lazy ones need memory for one at a time. State is
/// written as JSON ([`TrainingState`]). All ranks must end writing within the group's deadline of
/// each other. Only one job may save into a directory at a time. The directory must be on a file
/// system that all ranks share.
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
/// Costs one write of the rank's bytes and a checksum over them, four collectives of a few bytes an
/// entry, and the disk's sync. The procedure is that of PyTorch's `torch.distributed.checkpoint`
/// with a file a rank.
///
/// # Errors
///
/// On all ranks if on one: [`RecordFault::OtherRank`] on those that did not fail themselves. What
/// was written is removed, unless the record was complete already.
pub fn save_sharded(
    dir: &Path,
    group: &dyn ProcessGroup,
    entries: Vec<Entry>,
    state: TrainingState,
    keep: Keep,
) -> Result<Saved, ZeroError> {
    let mut slices = entries.iter().map(Entry::slice);
    let checked = slices.try_for_each(|slice| slice.tensor.check(&slice.range));
    end(group, "look at entries", checked)?;
    let is_first = group.rank() == 0;
    let begun = is_first.then(|| begin(dir, state.step)).transpose();
    let begun = share(group, "begin a record", begun)?;
    let (name, earlier) = begun.into_iter().flatten().next().expect("rank 0 began it");

    let partial = dir.join(name.partial());
    let written = write_rank_file(&partial, group, entries, state);
    let completed = share(group, "write a record", written).and_then(|tables| {
        let completed = is_first.then(|| complete(dir, name, tables)).transpose();
        if completed.is_ok() && is_first {
            remove_surplus(dir, &earlier, keep);
        }
        share(group, "complete a record", completed)
    });
    if completed.is_err() {
        // If removal fails, the next save tries again. The other ranks wait for the removal, unless
        // the group is lost.
        if is_first {
            remove(&partial);
        }
        drop(end(
            group,
            "remove an unfinished record",
            Ok::<_, ZeroError>(()),
        ));
    }
    let bytes = completed?.into_iter().flatten().next();
    Ok(Saved {
        path: dir.join(name.complete()),
        bytes: bytes.expect("rank 0 completed it"),
    })
}

/// Writes and syncs this rank's file in `dir` and returns its manifest.
fn write_rank_file(
    dir: &Path,
    group: &dyn ProcessGroup,
    mut entries: Vec<Entry>,
    state: TrainingState,
) -> Result<Manifest, RecordFault> {
    let (rank, world_size) = (group.rank(), group.world_size());
    entries.sort_by(|a, b| order(a.slice()).cmp(&order(b.slice())));
    let (mut tensors, mut keys) = (Vec::new(), HashSet::new());
    let slices = entries.iter().map(Entry::slice);
    for TensorSlice { tensor, range } in slices.filter(|slice| !slice.range.is_empty()) {
        let key = slice_key(&tensor.name, range);
        if !keys.insert(key.clone()) {
            return Err(tensor.error(format!("was given twice: {key}")));
        }
        tensors.push((key, tensor.dtype, vec![range.len()]));
    }
    let path = dir.join(rank_file(rank, world_size));
    // Fails where a rank does not see the directory that rank 0 made.
    let mut out = SyncedFile::create(&path)?;
    let header = header(state.step, tensors.into_iter());
    out.write(&header)?;
    let header = HeaderRow {
        bytes: out.bytes(),
        crc32: crc32fast::hash(&header),
    };
    let mut manifest = Manifest {
        state,
        ..Manifest::default()
    };
    for entry in entries {
        let (TensorSlice { tensor, range }, bytes) = entry.into_bytes()?;
        let slice = SliceRow {
            rank,
            offset: range.start,
            len: range.len(),
            at: out.bytes(),
            crc32: out.write_slice(&bytes)?,
        };
        let row = TensorRow {
            dtype: tensor.dtype,
            shape: tensor.shape,
            slices: vec![slice],
        };
        manifest.add_tensor(rank, tensor.name, row)?;
    }
    let bytes = out.finish()?;
    manifest.files.push(RankFile { bytes, header });
    sync_dir(dir)?;
    log::debug!("wrote {}", path.display());
    Ok(manifest)
}

/// The order of safetensors: the widest elements first, so that all are aligned.
fn order(slice: &TensorSlice) -> (Reverse<Dtype>, &str, usize) {
    let tensor = &slice.tensor;
    (Reverse(tensor.dtype), &tensor.name, slice.range.start)
}

/// Removes unfinished records and makes the directory of a new one, as rank 0. Returns its name,
/// and the earlier complete records, oldest first.
fn begin(dir: &Path, step: u64) -> Result<(RecordName, Vec<RecordName>), RecordFault> {
    make_dirs(dir)?;
    let listing = Listing::read(dir)?;
    for stale in &listing.partial {
        log::info!("{} was not finished: removed", stale.complete());
        remove(&dir.join(stale.partial()));
    }
    let number = listing.next_number();
    let name = RecordName { number, step };
    let partial = dir.join(name.partial());
    run("make", &partial, || fs::create_dir(&partial))?;
    Ok((name, listing.complete))
}

/// Writes the manifest of the files, makes the record complete and returns the files' bytes. The
/// record exists from the rename on.
fn complete(dir: &Path, name: RecordName, tables: Vec<Manifest>) -> Result<u64, RecordFault> {
    let partial = dir.join(name.partial());
    let manifest = Manifest::assemble(tables)?;
    manifest.check_files(&partial)?;
    let path = partial.join(MANIFEST);
    let mut file = SyncedFile::create(&path)?;
    file.write(manifest.to_json().as_bytes())?;
    file.finish()?;
    sync_dir(&partial)?;

    let complete = dir.join(name.complete());
    run("rename", &partial, || fs::rename(&partial, &complete))?;
    sync_dir(dir)?;
    let bytes = manifest.bytes();
    log::info!("saved {}: {bytes} bytes", complete.display());
    Ok(bytes)
}

/// Removes surplus records after a new one is complete.
fn remove_surplus(dir: &Path, earlier: &[RecordName], keep: Keep) {
    let Keep::Last(records) = keep else { return };
    let surplus = (earlier.len() + 1).saturating_sub(records.get());
    for old in &earlier[..surplus] {
        // Renamed first, so that a partly removed record never has a complete one's name.
        let (complete, partial) = (dir.join(old.complete()), dir.join(old.partial()));
        match run("rename", &complete, || fs::rename(&complete, &partial)) {
            Ok(()) => remove(&partial),
            Err(error) => burn_decorator::warn_user!("{error}"),
        }
    }
}
