//! Loading: a record is read in any slices, by any number of ranks.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use super::RecordError;
use super::directory::{Listing, MANIFEST, io_error};
use super::entry::{Failure, TensorSlice, TensorSpec};
use super::joint::JointWork;
use super::manifest::{Manifest, TrainingState, torn, verify};
use super::save::{IDENTITY, identity, rate};
use crate::ProcessGroup;

/// What is called while bytes are read; reading stops if it fails.
pub(crate) type AtWork<'a> = &'a mut dyn FnMut() -> Result<(), RecordError>;

/// A complete record, opened to read any slices of it.
///
/// Holds the manifest and no more. Every byte it returns was verified by its checksum.
#[derive(Debug)]
pub struct ShardedRecord {
    path: PathBuf,
    manifest: Manifest,
    /// Ranks whose files have the headers that were written.
    verified: HashSet<usize>,
    /// One file is open at a time: a record may have more than a process may open.
    open: Option<(usize, File)>,
    bytes_read: u64,
}

/// Bytes under one checksum.
struct Chunk {
    /// Whose file they are in.
    rank: usize,
    /// Where in the file.
    file_offset: u64,
    /// Which bytes of the whole tensor they are.
    bytes: Range<usize>,
    crc32: u32,
}

impl ShardedRecord {
    /// The last complete record of the directory `dir`.
    ///
    /// # Errors
    ///
    /// [`RecordError::NoRecord`] if there is none; an error that names the file if the record is damaged or of another version:
    /// then [`open_step`](Self::open_step) opens an older one.
    pub fn open(dir: &Path) -> Result<Self, RecordError> {
        Self::open_record(&Listing::locate(dir, None)?)
    }

    /// The last complete record of `step` in the directory `dir`.
    ///
    /// # Errors
    ///
    /// Those of [`open`](Self::open).
    pub fn open_step(dir: &Path, step: u64) -> Result<Self, RecordError> {
        Self::open_record(&Listing::locate(dir, Some(step))?)
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
            manifest,
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
        let record = Self::open_chosen(group, || Listing::locate(dir, step).map(Some))?;
        Ok(record.expect("rank 0 chose a record if all agree"))
    }

    /// As [`open_with`](Self::open_with), the last record; `None` if there is no complete one.
    ///
    /// # Errors
    ///
    /// On all ranks if on one.
    pub fn open_last(dir: &Path, group: &dyn ProcessGroup) -> Result<Option<Self>, RecordError> {
        Self::open_chosen(group, || match Listing::locate(dir, None) {
            Err(RecordError::NoRecord { .. }) => Ok(None),
            located => located.map(Some),
        })
    }

    /// Opens what rank 0 chooses.
    fn open_chosen(
        group: &dyn ProcessGroup,
        choose: impl FnOnce() -> Result<Option<PathBuf>, RecordError>,
    ) -> Result<Option<Self>, RecordError> {
        let chosen = match group.rank() {
            0 => choose(),
            _ => Ok(None),
        };
        let chosen = JointWork::new(group, "choose a record").share(chosen)?;
        let Some(path) = chosen.into_iter().flatten().next() else {
            return Ok(None);
        };
        let opened = Self::open_record(&path);
        JointWork::new(group, "open a record").end(opened.map(Some))
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
        self.read_ranges(tensor, core::slice::from_ref(range), &mut || Ok(()))
    }

    /// Several ranges of a tensor, one behind the other. Calls `at_work` after every chunk.
    pub(crate) fn read_ranges(
        &mut self,
        tensor: &TensorSpec,
        ranges: &[Range<usize>],
        at_work: AtWork,
    ) -> Result<Vec<u8>, RecordError> {
        let slices = ranges.iter();
        let slices = slices.map(|range| TensorSlice::new(tensor.clone(), range.clone()));
        let slices: Vec<_> = slices.collect();
        slices.iter().try_for_each(|slice| self.check(slice))?;
        let mut bytes = vec![0; slices.iter().map(TensorSlice::bytes).sum()];
        let mut rest = &mut bytes[..];
        for slice in &slices {
            let (out, after) = rest.split_at_mut(slice.bytes());
            self.fill(slice, out, at_work)?;
            rest = after;
        }
        Ok(bytes)
    }

    fn check(&self, wanted: &TensorSlice) -> Result<(), RecordError> {
        self.manifest.check_wanted(&self.path, wanted)
    }

    /// Reads a slice that was checked, into as many bytes as it has.
    fn fill(
        &mut self,
        wanted: &TensorSlice,
        out: &mut [u8],
        at_work: AtWork,
    ) -> Result<(), RecordError> {
        let size = wanted.tensor.element_bytes();
        let all = wanted.range.start * size..wanted.range.end * size;
        let mut partial = Vec::new();
        for chunk in self.chunks(&wanted.tensor, &wanted.range) {
            let bytes = chunk.bytes.clone();
            let common = all.start.max(bytes.start)..all.end.min(bytes.end);
            let out = &mut out[common.start - all.start..common.end - all.start];
            if common == bytes {
                self.read_chunk(&wanted.tensor, &chunk, out)?;
            } else {
                partial.resize(bytes.len(), 0);
                self.read_chunk(&wanted.tensor, &chunk, &mut partial)?;
                out.copy_from_slice(&partial[common.start - bytes.start..common.end - bytes.start]);
            }
            at_work()?;
        }
        Ok(())
    }

    /// Reads and checks every byte of the record. Costs memory for one chunk.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn verify(&mut self) -> Result<(), RecordError> {
        let tensors: Vec<_> = self.tensors().collect();
        let mut tensors = tensors.iter();
        tensors.try_for_each(|tensor| self.for_each_chunk(tensor, |_| Ok(())))?;
        // A rank without elements has a file too.
        (0..self.world_size()).try_for_each(|rank| self.verify_header(rank))
    }

    /// Reads a whole tensor of the record chunk by chunk as it was saved, so that no byte is read twice.
    pub(super) fn for_each_chunk(
        &mut self,
        tensor: &TensorSpec,
        mut take: impl FnMut(&[u8]) -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        let whole = TensorSlice::whole(tensor.clone());
        let mut bytes = Vec::new();
        for chunk in self.chunks(tensor, &whole.range) {
            bytes.resize(chunk.bytes.len(), 0);
            self.read_chunk(tensor, &chunk, &mut bytes)?;
            take(&bytes)?;
        }
        Ok(())
    }

    /// The chunks in which some elements of a tensor are, in order.
    fn chunks(&self, tensor: &TensorSpec, elements: &Range<usize>) -> Vec<Chunk> {
        let size = tensor.element_bytes();
        let wanted = elements.start * size..elements.end * size;
        let slices = &self.manifest.tensors[&tensor.name].slices;
        let first = slices.partition_point(|slice| slice.range().end <= elements.start);
        let slices = slices[first..].iter();
        let slices = slices.take_while(|slice| slice.offset < elements.end);
        let chunks = slices.flat_map(|slice| {
            let chunk_bytes = self.manifest.chunk_bytes;
            let (start, end) = (slice.offset * size, slice.range().end * size);
            let chunks = slice.crc32.iter().enumerate();
            chunks.map(move |(index, &crc32)| {
                let offset = index * chunk_bytes;
                let chunk = start + offset;
                Chunk {
                    rank: slice.rank,
                    file_offset: slice.file_offset + offset as u64,
                    bytes: chunk..end.min(chunk.saturating_add(chunk_bytes)),
                    crc32,
                }
            })
        });
        let overlaps =
            |chunk: &Chunk| chunk.bytes.start < wanted.end && wanted.start < chunk.bytes.end;
        chunks
            .filter(|chunk| !wanted.is_empty() && overlaps(chunk))
            .collect()
    }

    fn read_chunk(
        &mut self,
        tensor: &TensorSpec,
        chunk: &Chunk,
        out: &mut [u8],
    ) -> Result<(), RecordError> {
        self.verify_header(chunk.rank)?;
        self.read_at(chunk.rank, chunk.file_offset, out)?;
        let what = format!("bytes {:?} of `{}`", chunk.bytes, tensor.name);
        verify(&self.file(chunk.rank), &what, chunk.crc32, out)
    }

    /// Verifies once that a rank's file has the header of this record.
    fn verify_header(&mut self, rank: usize) -> Result<(), RecordError> {
        if !self.verified.insert(rank) {
            return Ok(());
        }
        let row = self.manifest.files[rank].clone();
        let mut header = vec![0; row.header_bytes as usize];
        self.read_at(rank, 0, &mut header)?;
        let verified = verify(&self.file(rank), "its header", row.header_crc32, &header);
        verified.map_err(|error| {
            self.verified.remove(&rank);
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
        })
    }

    fn read_at(&mut self, rank: usize, offset: u64, out: &mut [u8]) -> Result<(), RecordError> {
        let path = self.file(rank);
        let file = match &mut self.open {
            Some((open, file)) if *open == rank => file,
            open => {
                let file = File::open(&path).map_err(io_error("open", &path))?;
                &mut open.insert((rank, file)).1
            }
        };
        let found = file.seek(SeekFrom::Start(offset));
        let read = found.and_then(|_| file.read_exact(out));
        read.map_err(io_error("read", &path))?;
        self.bytes_read += out.len() as u64;
        Ok(())
    }

    fn file(&self, rank: usize) -> PathBuf {
        self.path.join(&self.manifest.files[rank].file)
    }

    /// Loads the slices in `wanted`: `take` is called with the index and the bytes of each, one after the other.
    /// Collective: returns when all ranks have loaded theirs.
    ///
    /// # Errors
    ///
    /// On all ranks if on one; `take` may then have received a part of the state.
    pub fn load(
        &mut self,
        group: &dyn ProcessGroup,
        wanted: &[TensorSlice],
        mut take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
    ) -> Result<TrainingState, RecordError> {
        let start = Instant::now();
        let before = self.bytes_read;
        // Missing tensors are found before `take` is called.
        let known = wanted.iter().try_for_each(|slice| self.check(slice));
        JointWork::new(group, "look for entries").end(known)?;
        let mut work = JointWork::new(group, "load a record");
        let loaded = wanted.iter().enumerate().try_for_each(|(index, wanted)| {
            let TensorSlice { tensor, range } = wanted;
            let range = core::slice::from_ref(range);
            let bytes = self.read_ranges(tensor, range, &mut || work.at_work())?;
            let not_taken =
                |reason| tensor.error(format!("was read, but could not be used: {reason}"));
            take(index, bytes).map_err(not_taken)
        });
        work.end(loaded)?;
        let (rank, path) = (group.rank(), self.path.display());
        let rate = rate(start, self.bytes_read - before);
        log::info!("rank {rank} loaded its share of {path}: {rate}");
        Ok(self.state(rank, group.world_size()))
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
    take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
) -> Result<TrainingState, RecordError> {
    ShardedRecord::open_with(dir, group, step)?.load(group, wanted, take)
}
