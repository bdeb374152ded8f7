//! Loading: a record is read in any slices, by any number of ranks.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::Value;

use super::RecordError;
use super::directory::{Listing, MANIFEST, RecordName, SyncedFile, parent, run, sync_dir};
use super::entry::{Failure, TensorSlice, TensorSpec};
use super::joint::JointWork;
use super::manifest::{Manifest, TrainingState, torn, verify};
use super::save::{IDENTITY, identity, safetensors_header};
use crate::{ProcessGroup, SingleRank};

/// A complete record, opened to read any slices of it.
///
/// Holds the manifest and no more. Every byte it returns was verified by its checksum.
#[derive(Debug)]
pub struct ShardedRecord {
    path: PathBuf,
    manifest: Arc<Manifest>,
    /// Ranks whose files have the headers that were written.
    verified: HashSet<usize>,
    /// One file is open at a time: a record may have more than a process may open.
    open: Option<(usize, File)>,
    bytes_read: u64,
}

impl ShardedRecord {
    /// The last complete record of the directory `dir`.
    ///
    /// # Errors
    ///
    /// [`RecordError::NoRecord`] if there is none; an error that names the file if the record is damaged or of another version:
    /// then [`open_step`](Self::open_step) opens an older one.
    pub fn open(dir: &Path) -> Result<Self, RecordError> {
        Self::open_record(&dir.join(Listing::locate(dir, None)?.complete()))
    }

    /// The last complete record of `step` in the directory `dir`.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn open_step(dir: &Path, step: u64) -> Result<Self, RecordError> {
        Self::open_record(&dir.join(Listing::locate(dir, Some(step))?.complete()))
    }

    /// The record whose own directory is `path`, wherever it was copied to.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open), but [`RecordError::Torn`] if there is none.
    pub fn open_record(path: &Path) -> Result<Self, RecordError> {
        let manifest = Manifest::read(&path.join(MANIFEST))?;
        manifest.check_lengths(path)?;
        Ok(Self {
            path: path.to_owned(),
            manifest: Arc::new(manifest),
            verified: HashSet::new(),
            open: None,
            bytes_read: 0,
        })
    }

    /// The last complete record of `dir`, or that of `step`, opened by all ranks. Collective: rank 0 chooses, so that all
    /// open the same even while another is being saved.
    ///
    /// # Errors
    ///
    /// On all ranks if on one.
    pub fn open_with(
        dir: &Path,
        group: &dyn ProcessGroup,
        step: Option<u64>,
    ) -> Result<Self, RecordError> {
        let record = Self::open_chosen(dir, group, || Listing::locate(dir, step).map(Some))?;
        Ok(record.expect("rank 0 chose a record if all agree"))
    }

    /// As [`open_with`](Self::open_with), the last record; `None` if there is no complete one.
    pub(crate) fn open_last(
        dir: &Path,
        group: &dyn ProcessGroup,
    ) -> Result<Option<Self>, RecordError> {
        Self::open_chosen(dir, group, || match Listing::locate(dir, None) {
            Err(RecordError::NoRecord { .. }) => Ok(None),
            located => located.map(Some),
        })
    }

    fn open_chosen(
        dir: &Path,
        group: &dyn ProcessGroup,
        choose: impl FnOnce() -> Result<Option<RecordName>, RecordError>,
    ) -> Result<Option<Self>, RecordError> {
        let chosen = match group.rank() {
            0 => choose(),
            _ => Ok(None),
        };
        let chosen = JointWork::new(group, "choose a record").share(chosen)?;
        let name = chosen.into_iter().flatten().next();
        let opened = name.map(|name| Self::open_record(&dir.join(name.complete())));
        JointWork::new(group, "open a record").end(opened.transpose())
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Ranks that saved it.
    pub fn world_size(&self) -> usize {
        self.manifest.world_size
    }

    /// Bytes of all files, without the manifest.
    pub fn bytes(&self) -> u64 {
        self.manifest.bytes()
    }

    /// Bytes read of its files so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read
    }

    /// The state that is no tensor. `generator` is that of `rank` if `world_size` ranks have saved the record, else `null`, because it
    /// belongs to no rank of another world size.
    pub fn state(&self, rank: usize, world_size: usize) -> TrainingState {
        let mut state = self.manifest.state.clone();
        if world_size == self.manifest.world_size {
            let generator = self.manifest.generators.get(rank);
            state.generator = generator.cloned().unwrap_or(Value::Null);
        }
        state
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorSpec> + '_ {
        let rows = self.manifest.tensors.iter();
        rows.map(|(name, row)| row.spec(name))
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<TensorSpec> {
        self.manifest.tensors.get(name).map(|row| row.spec(name))
    }

    /// The bytes of a slice, little-endian. Reads only the parts of files that contain them, and at most a mebibyte more on each
    /// side of each part.
    ///
    /// # Errors
    ///
    /// If the record has no such tensor, or one of another type or shape, or what is in the files is not what was written.
    pub fn read(&mut self, wanted: &TensorSlice) -> Result<Vec<u8>, RecordError> {
        let TensorSlice { tensor, range } = wanted;
        let group = SingleRank::new();
        let mut work = JointWork::new(&group, "read a record");
        self.read_ranges(tensor, core::slice::from_ref(range), &mut work)
    }

    /// Several ranges of a tensor, one behind the other, during joint work.
    pub(crate) fn read_ranges(
        &mut self,
        tensor: &TensorSpec,
        ranges: &[Range<usize>],
        work: &mut JointWork,
    ) -> Result<Vec<u8>, RecordError> {
        let wanted = |range| self.manifest.check_wanted(&self.path, tensor, range);
        ranges.iter().try_for_each(wanted)?;
        let elements: usize = ranges.iter().map(Range::len).sum();
        let mut found = Vec::with_capacity(elements * tensor.element_bytes());
        for range in ranges {
            self.for_each_part(tensor, range, |bytes| {
                found.extend_from_slice(bytes);
                work.at_work()
            })?;
        }
        Ok(found)
    }

    /// Reads and checks every byte of the record. Costs memory for one chunk.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn verify(&mut self) -> Result<(), RecordError> {
        let tensors = self.tensors().map(TensorSlice::whole);
        for TensorSlice { tensor, range } in tensors.collect::<Vec<_>>() {
            self.for_each_part(&tensor, &range, |_| Ok(()))?;
        }
        // A rank without elements has a file too.
        (0..self.world_size()).try_for_each(|rank| self.verify_header(rank))
    }

    /// Reads elements of a tensor in order, chunk by chunk as they were saved. `take` gets the wanted bytes of each chunk.
    fn for_each_part(
        &mut self,
        tensor: &TensorSpec,
        elements: &Range<usize>,
        mut take: impl FnMut(&[u8]) -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        let size = tensor.element_bytes();
        let (manifest, mut chunk) = (self.manifest.clone(), Vec::new());
        for slice in &manifest.tensors[&tensor.name].slices {
            let (start, end) = (slice.offset * size, slice.range().end * size);
            for (index, &crc32) in slice.crc32.iter().enumerate() {
                let offset = index * manifest.chunk_bytes;
                let first = start + offset;
                // The bytes of the tensor in this chunk, and those of them that are wanted.
                let bytes = first..end.min(first.saturating_add(manifest.chunk_bytes));
                let part =
                    bytes.start.max(elements.start * size)..bytes.end.min(elements.end * size);
                if part.is_empty() {
                    continue;
                }
                self.verify_header(slice.rank)?;
                chunk.resize(bytes.len(), 0);
                self.read_at(slice.rank, slice.file_offset + offset as u64, &mut chunk)?;
                let what = format!("bytes {bytes:?} of `{}`", tensor.name);
                verify(&self.file(slice.rank), &what, crc32, &chunk)?;
                take(&chunk[part.start - first..part.end - first])?;
            }
        }
        Ok(())
    }

    /// Verifies once that a rank's file has the header of this record.
    fn verify_header(&mut self, rank: usize) -> Result<(), RecordError> {
        if self.verified.contains(&rank) {
            return Ok(());
        }
        let row = &self.manifest.files[rank];
        let (mut header, crc32) = (vec![0; row.header_bytes as usize], row.header_crc32);
        self.read_at(rank, 0, &mut header)?;
        verify(&self.file(rank), "its header", crc32, &header).map_err(|error| {
            let header = String::from_utf8_lossy(&header);
            let expected = identity(self.manifest.state.step, rank, self.world_size());
            let found = header.split_once(&format!("\"{IDENTITY}\":\""));
            match found.and_then(|(_, rest)| rest.split_once('"')) {
                Some((found, _)) if found != expected => torn(
                    &self.file(rank),
                    format!("belongs to another record: it is of {found}, but the manifest is of {expected}"),
                ),
                _ => error,
            }
        })?;
        self.verified.insert(rank);
        Ok(())
    }

    fn read_at(&mut self, rank: usize, offset: u64, out: &mut [u8]) -> Result<(), RecordError> {
        let path = self.file(rank);
        let file = match &mut self.open {
            Some((open, file)) if *open == rank => file,
            open => {
                &mut open
                    .insert((rank, run("open", &path, || File::open(&path))?))
                    .1
            }
        };
        run("read", &path, || {
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(out)
        })?;
        self.bytes_read += out.len() as u64;
        Ok(())
    }

    fn file(&self, rank: usize) -> PathBuf {
        self.path.join(&self.manifest.files[rank].file)
    }

    /// Writes one section of the record into the file `out`, as [`consolidate`] does with the section `model`: all entries
    /// whose name is the section, a slash and a path, under that path.
    ///
    /// # Errors
    ///
    /// [`RecordError::OtherModel`] if there are none, and those of [`consolidate`].
    pub fn consolidate(&mut self, section: &str, out: &Path) -> Result<(), RecordError> {
        let in_section = |spec: TensorSpec| {
            let path = spec.name.strip_prefix(section)?.strip_prefix('/')?;
            Some((path.to_owned(), TensorSlice::whole(spec)))
        };
        let mut tensors: Vec<_> = self.tensors().filter_map(in_section).collect();
        if tensors.is_empty() {
            let names = self.manifest.tensors.keys();
            let mut sections: Vec<_> = names.filter_map(|name| name.split('/').next()).collect();
            sections.dedup();
            let sections = sections.join(", ");
            return Err(RecordError::OtherModel {
                path: self.path.clone(),
                reason: format!(
                    "has no entries in the section `{section}`; its sections are {sections}"
                ),
            });
        }
        // As safetensors orders; the names are in order.
        tensors.sort_by_key(|(_, slice)| Reverse(slice.tensor.dtype));
        let step = self.manifest.state.step.to_string();
        let infos = tensors.iter();
        let infos = infos.map(|(path, whole)| (path.clone(), whole.tensor.shape.clone(), whole));
        let header = safetensors_header("step", step, infos);

        // Beside `out`, so that it can be renamed to it.
        let mut name = OsString::from(".");
        name.push(out.file_name().unwrap_or_default());
        name.push(".partial");
        let temporary = out.with_file_name(name);
        // Left over from a killed call.
        let _ = fs::remove_file(&temporary);
        let mut write = || {
            let mut file = SyncedFile::create(&temporary)?;
            file.write(&header)?;
            for (_, TensorSlice { tensor, range }) in &tensors {
                self.for_each_part(tensor, range, |bytes| file.write(bytes))?;
            }
            let bytes = file.sync()?;
            run("rename", &temporary, || fs::rename(&temporary, out))?;
            sync_dir(parent(out))?;
            log::info!("{section} of a record in {}: {bytes} bytes", out.display());
            Ok(())
        };
        write().inspect_err(|_| {
            // The first error is returned; the file may not exist.
            let _ = fs::remove_file(&temporary);
        })
    }
}

/// Loads slices of the last complete record in `dir`, or of that of `step`: any slices, at any world size, bit for bit what
/// was saved. Collective: every rank calls it with the slices that it wants, which may overlap those of other ranks.
///
/// `take` is called with the index in `wanted` and the bytes (little-endian) of each slice, one after the other, so that there
/// is never a second copy of the state. Each rank reads only the parts of files that contain its slices. To
/// inspect a record before choosing slices, open it with [`ShardedRecord::open_with`]. Each call of `take` must return within
/// the group's deadline; reading may take longer.
///
/// # Errors
///
/// On all ranks if on one: [`RecordError::OtherRank`] on those that did not fail themselves. The error for a record that is damaged,
/// of another version or of another model names the file or the entry; an older record is never loaded instead.
pub fn load_sharded(
    dir: &Path,
    group: &dyn ProcessGroup,
    step: Option<u64>,
    wanted: &[TensorSlice],
    mut take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
) -> Result<TrainingState, RecordError> {
    let mut record = ShardedRecord::open_with(dir, group, step)?;
    // Missing tensors are found before `take` is called.
    let check = |TensorSlice { tensor, range }: &TensorSlice| {
        record.manifest.check_wanted(&record.path, tensor, range)
    };
    JointWork::new(group, "look for entries").end(wanted.iter().try_for_each(check))?;
    let mut work = JointWork::new(group, "load a record");
    let loaded = wanted.iter().enumerate().try_for_each(|(index, wanted)| {
        let TensorSlice { tensor, range } = wanted;
        let bytes = record.read_ranges(tensor, core::slice::from_ref(range), &mut work)?;
        let not_taken = |reason| tensor.error(format!("was read, but could not be used: {reason}"));
        take(index, bytes).map_err(not_taken)
    });
    work.end(loaded)?;
    log::info!("rank {} loaded {}", group.rank(), record.path.display());
    Ok(record.state(group.rank(), group.world_size()))
}

/// Writes the model of the last complete record in `dir` into the file `out`: whole tensors by their path in the module,
/// which is what Burn's `SafetensorsStore` reads:
///
/// ```no_run
/// # use burn::nn::{Linear, LinearConfig};
/// # use burn_flex::Flex;
/// use burn_store::{ModuleSnapshot, SafetensorsStore};
///
/// # let mut model: Linear<Flex> = LinearConfig::new(2, 2).init(&Default::default());
/// burn_zero::consolidate("records".as_ref(), "model.safetensors".as_ref())?;
/// model.load_from(&mut SafetensorsStore::from_file("model.safetensors"))?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// and so does any other program that reads safetensors. An existing file is replaced atomically, when the new one is on the
/// disk. Costs one read and one write of the model, and a mebibyte of memory.
///
/// # Errors
///
/// Those of [`ShardedRecord::read`], or of the file system.
pub fn consolidate(dir: &Path, out: &Path) -> Result<(), RecordError> {
    ShardedRecord::open(dir)?.consolidate("model", out)
}
