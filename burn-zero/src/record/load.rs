//! Loading: a record is read in any pieces, by any number of ranks.

use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::Value;

use super::agree::{Together, agree, split};
use super::entry::{Failure, Piece, TensorSpec};
use super::layout::{Listing, MANIFEST};
use super::manifest::{Manifest, PieceRow, check_lengths};
use super::parts::{AtWork, Parts};
use super::report::Rate;
use super::{RecordError, TrainingState};
use crate::ProcessGroup;

/// A complete record, opened to read any pieces of it.
///
/// Holds the manifest, and of the files no more than headers. Every byte it returns was verified by its checksum.
#[derive(Debug)]
pub struct ShardedRecord {
    path: PathBuf,
    manifest: Manifest,
    parts: Parts,
}

impl ShardedRecord {
    /// The last complete record of the directory `dir`.
    ///
    /// # Errors
    ///
    /// [`RecordError::NoRecord`] if there is none; an error that names the file if it is torn, foreign or of another version:
    /// an older record is then opened with [`open_step`](Self::open_step).
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
    /// Those of [`open`](Self::open), but [`RecordError::MissingFile`] if there is none.
    pub fn open_record(path: &Path) -> Result<Self, RecordError> {
        let manifest = Manifest::read(&path.join(MANIFEST))?;
        check_lengths(path, &manifest)?;
        Ok(Self {
            path: path.to_owned(),
            manifest,
            parts: Parts::new(path.to_owned()),
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
        let chosen = agree(group, "choose a record", chosen)?;
        let Some(path) = chosen.into_iter().flatten().next() else {
            return Ok(None);
        };
        let (record, done) = split(Self::open_record(&path));
        agree(group, "open a record", done)?;
        Ok(record)
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
        self.parts.bytes_read
    }

    /// The small state. With `generator` of the rank that asks if as many ranks ask as saved; else that is `null`, for no
    /// state of theirs is that of one of these.
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

    /// The bytes of a piece, little-endian. Reads only the parts of files in which they are, at most a mebibyte more on each
    /// side of each.
    ///
    /// # Errors
    ///
    /// If the record has no such tensor, or one of another type or shape, or what is in the files is not what was written.
    pub fn read(&mut self, wanted: &Piece) -> Result<Vec<u8>, RecordError> {
        self.read_at_work(wanted, &mut || Ok(()))
    }

    fn read_at_work(&mut self, wanted: &Piece, at_work: AtWork) -> Result<Vec<u8>, RecordError> {
        let mut bytes = vec![0; self.check(wanted)?];
        self.fill(wanted, &mut bytes, at_work)?;
        Ok(bytes)
    }

    /// As [`read`](Self::read), into memory that is there.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read), and [`RecordError::ByteLength`] if `out` is not as long as the piece.
    pub fn read_into(&mut self, wanted: &Piece, out: &mut [u8]) -> Result<(), RecordError> {
        let bytes = self.check(wanted)?;
        let name = &wanted.tensor.name;
        if out.len() != bytes {
            return Err(RecordError::ByteLength {
                name: name.clone(),
                expected: bytes,
                found: out.len(),
            });
        }
        self.fill(wanted, out, &mut || Ok(()))
    }

    /// Reads a piece that was checked, into as many bytes as it has.
    fn fill(&mut self, piece: &Piece, out: &mut [u8], at_work: AtWork) -> Result<(), RecordError> {
        let Self {
            manifest, parts, ..
        } = self;
        let name = &piece.tensor.name;
        let row = &manifest.tensors[name];
        parts.read(manifest, name, row, piece.range.clone(), out, at_work)
    }

    /// Bytes of a piece that the record has.
    fn check(&self, wanted: &Piece) -> Result<usize, RecordError> {
        self.manifest.row(&self.path.join(MANIFEST), wanted)?;
        Ok(wanted.bytes())
    }

    /// Reads all of it and forgets it again: an error if a byte is not what was written. Costs memory for one chunk.
    ///
    /// # Errors
    ///
    /// Those of [`read`](Self::read).
    pub fn verify(&mut self) -> Result<(), RecordError> {
        let tensors: Vec<_> = self.tensors().collect();
        for tensor in tensors {
            self.read_chunks(&tensor, |_| Ok(()))?;
        }
        Ok(())
    }

    /// Reads a whole tensor of the record chunk by chunk as it was saved, so that no byte is read twice.
    pub(super) fn read_chunks(
        &mut self,
        tensor: &TensorSpec,
        mut take: impl FnMut(&[u8]) -> Result<(), RecordError>,
    ) -> Result<(), RecordError> {
        let row = &self.manifest.tensors[&tensor.name];
        let saved = row.pieces.iter().map(PieceRow::range);
        let chunks = saved.flat_map(|range| Piece::new(tensor.clone(), range).chunks());
        let mut bytes = Vec::new();
        for chunk in chunks.collect::<Vec<_>>() {
            bytes.resize(chunk.bytes(), 0);
            self.read_into(&chunk, &mut bytes)?;
            take(&bytes)?;
        }
        Ok(())
    }

    /// Loads the pieces that this rank wants: each is given to `take` with its place in `wanted`, one after the other.
    /// Collective: returns on all ranks when all have what they want.
    ///
    /// # Errors
    ///
    /// On all ranks if on one; what `take` received until then is then no whole state.
    pub fn load(
        &mut self,
        group: &dyn ProcessGroup,
        wanted: &[Piece],
        mut take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
    ) -> Result<TrainingState, RecordError> {
        let start = Instant::now();
        let before = self.parts.bytes_read;
        // What is not there is found before anything is taken.
        let known = wanted
            .iter()
            .try_for_each(|piece| self.check(piece).map(drop));
        agree(group, "look for entries", known)?;
        let mut loading = Together::new(group, "load a record");
        let mut pieces = wanted.iter().enumerate();
        let loaded = pieces.try_for_each(|(index, piece)| {
            let bytes = self.read_at_work(piece, &mut || loading.at_work())?;
            take(index, bytes).map_err(|reason| RecordError::NotTaken {
                name: piece.tensor.name.clone(),
                reason: reason.to_string(),
            })
        });
        loading.end(loaded)?;
        let rate = Rate::since(start, self.parts.bytes_read - before);
        let (rank, path) = (group.rank(), self.path.display());
        log::info!("rank {rank} loaded its part of {path}: {rate}");
        Ok(self.state(rank, group.world_size()))
    }
}

/// Loads pieces of the last complete record in `dir`, or of that of `step`: any pieces, at any world size, bit for bit what
/// was saved. Collective: every rank calls it with the pieces that it wants, which may overlap those of other ranks.
///
/// The bytes of each piece (little-endian) are given to `take` with its place in `wanted`, one after the other, so that there
/// is never a second copy of the state. Each rank reads the parts of files in which its pieces are, and no more. Who has to
/// look into the record before knowing what to want opens it with [`ShardedRecord::open_with`]. Each call of `take` has to return within
/// the group's deadline; reading may take longer.
///
/// # Errors
///
/// On all ranks if on one: [`RecordError::OtherRank`] on those that did not fail themselves. A record that is torn, foreign,
/// of another version or of another model is named, with the file or the entry; an older one is not silently taken instead.
pub fn load_sharded(
    dir: &Path,
    group: &dyn ProcessGroup,
    step: Option<u64>,
    wanted: &[Piece],
    take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
) -> Result<TrainingState, RecordError> {
    ShardedRecord::open_with(dir, group, step)?.load(group, wanted, take)
}
