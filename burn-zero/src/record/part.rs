//! The file of one rank, as it is written.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::io::{self, BufWriter, Write};
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::RecordError;
use super::entry::{Entry, Piece};
use super::error::io_error;
use super::layout::{part_file, piece_key};
use super::manifest::{CHUNK_BYTES, PartRow, PieceRow, TensorRow};
use super::storage::{Output, Storage};

/// The key of the safetensors metadata that says which part of which record a file is.
pub(super) const IDENTITY: &str = "burn-zero";

/// Bytes before a safetensors header: its length.
pub(super) const LENGTH_BYTES: usize = size_of::<u64>();

/// Which part of which record a file is.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartId {
    pub step: u64,
    pub rank: usize,
    pub world_size: usize,
}

impl PartId {
    /// Name of the file.
    pub fn file(self) -> String {
        part_file(self.rank, self.world_size)
    }

    /// What the file says of itself.
    pub fn identity(self) -> String {
        let Self {
            step,
            rank,
            world_size,
        } = self;
        format!("step {step}, rank {rank} of {world_size}")
    }
}

/// Writes the entries of one rank into `dir`, one after the other, and returns when they are on the disk. Calls `at_work`
/// after every chunk, and stops if it fails.
pub(super) fn write_part(
    storage: &dyn Storage,
    dir: &Path,
    id: PartId,
    entries: Vec<Entry>,
    mut at_work: impl FnMut() -> Result<(), RecordError>,
) -> Result<(PartRow, Vec<(String, TensorRow)>), RecordError> {
    let (mut entries, empty): (Vec<_>, Vec<_>) = entries
        .into_iter()
        .partition(|entry| !entry.piece.range.is_empty());
    entries.sort_by(|a, b| order(&a.piece).cmp(&order(&b.piece)));
    let header = header(id.identity(), entries.iter().map(Entry::piece))?;

    let path = dir.join(id.file());
    let created = storage
        .create_file(&path)
        .map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => RecordError::NotShared {
                rank: id.rank,
                path: dir.to_owned(),
            },
            _ => io_error("create", &path)(error),
        })?;
    let mut file = PartFile::new(&path, created);
    file.write(&header)?;
    let mut rows: Vec<_> = empty
        .iter()
        .map(|entry| row(&entry.piece, id.rank, Vec::new()))
        .collect();
    for entry in entries {
        let piece = entry.piece.clone();
        let mut crc32 = Vec::with_capacity(piece.bytes().div_ceil(CHUNK_BYTES));
        for chunk in entry.into_bytes()?.chunks(CHUNK_BYTES) {
            crc32.push(crc32fast::hash(chunk));
            file.write(chunk)?;
            at_work()?;
        }
        rows.push(row(&piece, id.rank, crc32));
    }
    let part = PartRow {
        file: id.file(),
        bytes: file.finish()?,
        header_crc32: crc32fast::hash(&header),
    };
    Ok((part, rows))
}

/// As safetensors orders: the widest elements first, so that all are aligned.
fn order(piece: &Piece) -> (Reverse<Dtype>, &str, usize) {
    let tensor = &piece.tensor;
    (Reverse(tensor.dtype), &tensor.name, piece.range.start)
}

fn row(piece: &Piece, rank: usize, crc32: Vec<u32>) -> (String, TensorRow) {
    let row = TensorRow {
        dtype: piece.tensor.dtype,
        shape: piece.tensor.shape.clone(),
        pieces: vec![PieceRow {
            rank,
            offset: piece.range.start,
            len: piece.range.len(),
            crc32,
        }],
    };
    (piece.tensor.name.clone(), row)
}

/// Length and text of a safetensors header of flat tensors that follow each other, padded so that the first is aligned.
fn header<'a>(
    identity: String,
    pieces: impl Iterator<Item = &'a Piece>,
) -> Result<Vec<u8>, RecordError> {
    let mut infos: Vec<(String, TensorInfo)> = Vec::new();
    let mut known = HashSet::new();
    let mut offset = 0;
    for piece in pieces {
        let key = piece_key(&piece.tensor.name, &piece.range);
        if !known.insert(key.clone()) {
            return Err(RecordError::GivenTwice { piece: key });
        }
        let end = offset + piece.bytes();
        let info = TensorInfo {
            dtype: piece.tensor.dtype,
            shape: vec![piece.range.len()],
            data_offsets: (offset, end),
        };
        infos.push((key, info));
        offset = end;
    }
    Ok(safetensors_header(
        HashMap::from([(IDENTITY.to_owned(), identity)]),
        infos,
    ))
}

/// Length and text of a safetensors header, padded with spaces to whole words.
///
/// # Panics
///
/// If the tensors do not follow each other or a name comes twice.
pub(super) fn safetensors_header(
    metadata: HashMap<String, String>,
    infos: Vec<(String, TensorInfo)>,
) -> Vec<u8> {
    let metadata = Metadata::new(Some(metadata), infos).expect("the tensors follow each other");
    let mut text = serde_json::to_vec(&metadata).expect("strings and integers are JSON");
    text.resize(text.len().next_multiple_of(LENGTH_BYTES), b' ');
    let mut header = (text.len() as u64).to_le_bytes().to_vec();
    header.append(&mut text);
    header
}

/// Bytes written between two syncs: the last sync of a large file would take minutes, in which a rank could not tell the
/// others that it is at work.
const SYNC_BYTES: u64 = 64 << 20;

/// A file that counts what it is given, in writes of a useful size.
pub(super) struct PartFile<'a> {
    path: &'a Path,
    file: BufWriter<Box<dyn Output>>,
    bytes: u64,
    unsynced_bytes: u64,
}

impl<'a> PartFile<'a> {
    pub fn new(path: &'a Path, file: Box<dyn Output>) -> Self {
        Self {
            path,
            file: BufWriter::with_capacity(CHUNK_BYTES, file),
            bytes: 0,
            unsynced_bytes: 0,
        }
    }

    pub fn write(&mut self, bytes: &[u8]) -> Result<(), RecordError> {
        let written = self.file.write_all(bytes);
        written.map_err(io_error("write", self.path))?;
        self.bytes += bytes.len() as u64;
        self.unsynced_bytes += bytes.len() as u64;
        if self.unsynced_bytes >= SYNC_BYTES {
            self.sync()?;
        }
        Ok(())
    }

    /// Returns the bytes written when they are on the disk.
    pub fn finish(mut self) -> Result<u64, RecordError> {
        self.sync()?;
        Ok(self.bytes)
    }

    fn sync(&mut self) -> Result<(), RecordError> {
        self.file.flush().map_err(io_error("write", self.path))?;
        let file = self.file.get_mut();
        file.sync().map_err(io_error("sync", self.path))?;
        self.unsynced_bytes = 0;
        Ok(())
    }
}
