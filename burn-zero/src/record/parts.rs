//! The files of all ranks, as they are read: only the bytes that are asked for, and each of them under its checksum.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::tensor::Metadata;

use super::RecordError;
use super::error::io_error;
use super::layout::piece_key;
use super::manifest::{Manifest, PieceRow, TensorRow, check_length};
use super::part::{IDENTITY, LENGTH_BYTES, PartId};

/// What is called while bytes are read.
pub(super) type AtWork<'a> = &'a mut dyn FnMut() -> Result<(), RecordError>;

/// Reads the parts of a record. One file is open at a time: a record may have more than a process may open.
#[derive(Debug)]
pub(super) struct Parts {
    dir: PathBuf,
    headers: HashMap<usize, Header>,
    open: Option<(usize, File)>,
    /// Bytes read so far.
    pub bytes_read: u64,
}

/// A file's verified header.
#[derive(Debug)]
struct Header {
    metadata: Metadata,
    /// Where the tensors begin in the file.
    data_start: u64,
}

/// A part of a piece: where its bytes are.
struct Section<'a> {
    path: PathBuf,
    row: &'a PieceRow,
    key: String,
    /// Where the piece begins in the file.
    start: u64,
    /// The piece's length.
    bytes: usize,
    chunk_bytes: usize,
}

impl Parts {
    pub fn new(dir: PathBuf) -> Self {
        Self {
            dir,
            headers: HashMap::new(),
            open: None,
            bytes_read: 0,
        }
    }

    /// Reads the elements `range` of a tensor into `out`, which is as long as they are. Calls `at_work` after every chunk,
    /// and stops if it fails.
    pub fn read(
        &mut self,
        manifest: &Manifest,
        name: &str,
        row: &TensorRow,
        range: Range<usize>,
        out: &mut [u8],
        at_work: AtWork,
    ) -> Result<(), RecordError> {
        let element_bytes = row.dtype.bitsize() / 8;
        if range.is_empty() {
            return Ok(());
        }
        let first = row
            .pieces
            .partition_point(|piece| piece.range().end <= range.start);
        for piece in &row.pieces[first..] {
            let held = piece.range();
            if held.start >= range.end {
                break;
            }
            let common = range.start.max(held.start)..range.end.min(held.end);
            let bytes = |elements: Range<usize>, origin: usize| {
                (elements.start - origin) * element_bytes..(elements.end - origin) * element_bytes
            };
            let out = &mut out[bytes(common.clone(), range.start)];
            let section = self.section(manifest, name, row, piece)?;
            self.read_section(&section, bytes(common, held.start), out, at_work)?;
        }
        Ok(())
    }

    /// Finds a piece in its file.
    fn section<'a>(
        &mut self,
        manifest: &Manifest,
        name: &str,
        row: &TensorRow,
        piece: &'a PieceRow,
    ) -> Result<Section<'a>, RecordError> {
        let rank = piece.rank;
        let path = self.dir.join(&manifest.parts[rank].file);
        if !self.headers.contains_key(&rank) {
            let header = self.read_header(manifest, rank, &path)?;
            self.headers.insert(rank, header);
        }
        let header = &self.headers[&rank];
        let key = piece_key(name, &piece.range());
        let bytes = piece.len * row.dtype.bitsize() / 8;
        let found = header.metadata.info(&key).filter(|info| {
            let (start, end) = info.data_offsets;
            info.dtype == row.dtype && end - start == bytes
        });
        let Some(info) = found else {
            let reason = format!("it has no {} {key}", row.dtype);
            return Err(RecordError::BadPart { path, reason });
        };
        Ok(Section {
            path,
            row: piece,
            key,
            start: header.data_start + info.data_offsets.0 as u64,
            bytes,
            chunk_bytes: manifest.chunk_bytes,
        })
    }

    /// Reads the bytes `wanted` of a piece, in whole chunks so that each can be verified.
    fn read_section(
        &mut self,
        section: &Section,
        wanted: Range<usize>,
        out: &mut [u8],
        at_work: AtWork,
    ) -> Result<(), RecordError> {
        let chunk_bytes = section.chunk_bytes;
        let mut partial = Vec::new();
        for index in wanted.start / chunk_bytes..wanted.end.div_ceil(chunk_bytes) {
            let start = index * chunk_bytes;
            let chunk = start..section.bytes.min(start.saturating_add(chunk_bytes));
            let common = wanted.start.max(chunk.start)..wanted.end.min(chunk.end);
            let out = &mut out[common.start - wanted.start..common.end - wanted.start];
            if common == chunk {
                self.read_chunk(section, index, out)?;
            } else {
                partial.resize(chunk.len(), 0);
                self.read_chunk(section, index, &mut partial)?;
                out.copy_from_slice(&partial[common.start - start..common.end - start]);
            }
            at_work()?;
        }
        Ok(())
    }

    fn read_chunk(
        &mut self,
        section: &Section,
        index: usize,
        out: &mut [u8],
    ) -> Result<(), RecordError> {
        let offset = section.start + (index * section.chunk_bytes) as u64;
        self.read_at(section.row.rank, &section.path, offset, out)?;
        let expected = section.row.crc32[index];
        verify(&section.path, expected, out, || {
            format!("chunk {index} of {}", section.key)
        })
    }

    fn read_at(
        &mut self,
        rank: usize,
        path: &Path,
        offset: u64,
        out: &mut [u8],
    ) -> Result<(), RecordError> {
        let file = match &mut self.open {
            Some((open, file)) if *open == rank => file,
            open => {
                let file = File::open(path).map_err(io_error("open", path))?;
                &mut open.insert((rank, file)).1
            }
        };
        let found = file.seek(SeekFrom::Start(offset));
        let read = found.and_then(|_| file.read_exact(out));
        read.map_err(io_error("read", path))?;
        self.bytes_read += out.len() as u64;
        Ok(())
    }

    fn read_header(
        &mut self,
        manifest: &Manifest,
        rank: usize,
        path: &Path,
    ) -> Result<Header, RecordError> {
        let part = &manifest.parts[rank];
        check_length(path, part.bytes)?;
        let bad = |reason: String| RecordError::BadPart {
            path: path.to_owned(),
            reason,
        };
        let mut length = [0; LENGTH_BYTES];
        self.read_at(rank, path, 0, &mut length)?;
        let text_bytes = u64::from_le_bytes(length);
        let data_start = text_bytes.checked_add(LENGTH_BYTES as u64);
        let data_start = data_start.filter(|&start| start <= part.bytes);
        let data_start = data_start.ok_or_else(|| {
            bad(format!(
                "a header of {text_bytes} bytes in a file of {}",
                part.bytes
            ))
        })?;
        let mut header = length.to_vec();
        header.resize(data_start as usize, 0);
        self.read_at(rank, path, length.len() as u64, &mut header[LENGTH_BYTES..])?;

        let metadata: Result<Metadata, _> = serde_json::from_slice(&header[LENGTH_BYTES..]);
        // Whose it is before whether it is whole: another record's file is whole too.
        if let Ok(metadata) = &metadata {
            check_identity(manifest, rank, path, metadata)?;
        }
        verify(path, part.header_crc32, &header, || "the header".to_owned())?;
        let metadata = metadata.map_err(|error| bad(error.to_string()))?;
        if data_start + metadata.data_len() as u64 != part.bytes {
            return Err(bad("its header describes another length".to_owned()));
        }
        Ok(Header {
            metadata,
            data_start,
        })
    }
}

fn check_identity(
    manifest: &Manifest,
    rank: usize,
    path: &Path,
    metadata: &Metadata,
) -> Result<(), RecordError> {
    let id = PartId {
        step: manifest.state.step,
        rank,
        world_size: manifest.world_size,
    };
    let expected = id.identity();
    let identity = metadata.metadata().as_ref();
    let found = identity.and_then(|metadata| metadata.get(IDENTITY));
    if found == Some(&expected) {
        return Ok(());
    }
    Err(RecordError::ForeignFile {
        path: path.to_owned(),
        expected,
        found: found.map_or("no record".to_owned(), Clone::clone),
    })
}

fn verify(
    path: &Path,
    expected: u32,
    bytes: &[u8],
    what: impl FnOnce() -> String,
) -> Result<(), RecordError> {
    let found = crc32fast::hash(bytes);
    if found == expected {
        return Ok(());
    }
    Err(RecordError::Checksum {
        path: path.to_owned(),
        what: what(),
        expected,
        found,
    })
}
