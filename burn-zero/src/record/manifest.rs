//! The manifest: which elements of which tensor are where. Pure values.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;

use super::entry::{Piece, TensorSpec};
use super::error::io_error;
use super::layout::{part_file, piece_key};
use super::{RecordError, TrainingState};

/// What the envelope of every manifest says it is.
const FORMAT: &str = "burn-zero sharded record";

/// The version that this program writes and reads.
pub(super) const VERSION: u32 = 1;

/// Bytes under one checksum: what is read at least to verify a part of a piece.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// The outermost JSON object. The checksum is that of `manifest` as text, so that state is never read from torn JSON.
#[derive(Serialize, Deserialize)]
struct Envelope<'a> {
    format: String,
    version: u32,
    crc32: u32,
    #[serde(borrow)]
    manifest: &'a RawValue,
}

/// Only what says whether the rest can be understood.
#[derive(Deserialize)]
struct Heading {
    format: String,
    version: u32,
}

/// A record's table of contents.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub world_size: usize,
    /// Bytes under each checksum but a piece's last, which is that of the rest.
    pub chunk_bytes: usize,
    /// What all ranks have in common.
    pub state: TrainingState,
    /// The generator's state of each rank.
    pub generators: Vec<Value>,
    /// The file of each rank.
    pub parts: Vec<PartRow>,
    /// By name.
    pub tensors: BTreeMap<String, TensorRow>,
}

/// The file of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartRow {
    pub file: String,
    /// Length of the file.
    pub bytes: u64,
    /// Checksum of its safetensors header.
    pub header_crc32: u32,
}

/// A tensor and its pieces in the order of their elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorRow {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub pieces: Vec<PieceRow>,
}

/// Elements `offset..offset + len` of a flattened tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PieceRow {
    pub rank: usize,
    pub offset: usize,
    pub len: usize,
    /// One for each chunk.
    pub crc32: Vec<u32>,
}

impl PieceRow {
    /// The elements. Of a foreign piece that no machine can count, as many as it can: no tensor has them.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset.saturating_add(self.len)
    }
}

impl TensorRow {
    pub fn spec(&self, name: &str) -> TensorSpec {
        TensorSpec::new(name, self.dtype, self.shape.clone())
    }
}

impl Manifest {
    /// Bytes of all files of the ranks.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).sum()
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        let unfailing = "strings, integers and JSON values are JSON";
        let manifest = serde_json::value::to_raw_value(self).expect(unfailing);
        let envelope = Envelope {
            format: FORMAT.to_owned(),
            version: VERSION,
            crc32: crc32fast::hash(manifest.get().as_bytes()),
            manifest: &manifest,
        };
        serde_json::to_string(&envelope).expect(unfailing)
    }

    /// The manifest in the file at `path`.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let mut text = String::new();
        let mut file = match File::open(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(RecordError::MissingFile {
                    path: path.to_owned(),
                });
            }
            opened => opened.map_err(io_error("open", path))?,
        };
        match file.read_to_string(&mut text) {
            Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
                Err(not_one(path, error.to_string()))
            }
            read => read.map_err(io_error("read", path)),
        }?;
        Self::parse(path, &text)
    }

    fn parse(path: &Path, text: &str) -> Result<Self, RecordError> {
        let because = |error: serde_json::Error| not_one(path, error.to_string());
        let heading: Heading = serde_json::from_str(text).map_err(because)?;
        if heading.format != FORMAT {
            return Err(not_one(path, format!("its format is `{}`", heading.format)));
        }
        if heading.version != VERSION {
            return Err(RecordError::Version {
                path: path.to_owned(),
                found: heading.version,
                supported: VERSION,
            });
        }
        let envelope: Envelope = serde_json::from_str(text).map_err(because)?;
        let found = crc32fast::hash(envelope.manifest.get().as_bytes());
        if found != envelope.crc32 {
            return Err(RecordError::Checksum {
                path: path.to_owned(),
                what: "the manifest".to_owned(),
                expected: envelope.crc32,
                found,
            });
        }
        let manifest: Self = serde_json::from_str(envelope.manifest.get()).map_err(because)?;
        manifest
            .check_form()
            .map_err(|reason| not_one(path, reason))?;
        manifest
            .check()
            .map_err(|source| RecordError::Inconsistent {
                path: path.to_owned(),
                source: Box::new(source),
            })?;
        Ok(manifest)
    }

    /// That nothing in it leads outside of the record or of its own tables.
    fn check_form(&self) -> Result<(), String> {
        let ranks = self.world_size;
        if self.parts.len() != ranks || self.generators.len() != ranks {
            return Err(format!("it does not have {ranks} parts for {ranks} ranks"));
        }
        if self.chunk_bytes == 0 {
            return Err("chunks of 0 bytes".to_owned());
        }
        for (rank, part) in self.parts.iter().enumerate() {
            if part.file != part_file(rank, ranks) {
                return Err(format!(
                    "rank {rank} of {ranks} has the file `{}`",
                    part.file
                ));
            }
        }
        for (name, row) in &self.tensors {
            let element_bytes = row.dtype.bitsize() / 8;
            for piece in &row.pieces {
                let bytes = piece.len.saturating_mul(element_bytes);
                if piece.rank >= ranks || piece.crc32.len() != bytes.div_ceil(self.chunk_bytes) {
                    return Err(format!(
                        "the piece {} is malformed",
                        piece_key(name, &piece.range())
                    ));
                }
            }
        }
        Ok(())
    }

    /// The row of what is wanted, if it is what is there.
    pub fn row(&self, path: &Path, wanted: &Piece) -> Result<&TensorRow, RecordError> {
        wanted.check()?;
        let spec = &wanted.tensor;
        let Some(row) = self.tensors.get(&spec.name) else {
            return Err(RecordError::MissingEntry {
                path: path.to_owned(),
                name: spec.name.clone(),
                nearest: nearest(&spec.name, self.tensors.keys()),
            });
        };
        if row.dtype != spec.dtype {
            return Err(RecordError::DtypeDiffers {
                path: path.to_owned(),
                name: spec.name.clone(),
                found: row.dtype,
                wanted: spec.dtype,
            });
        }
        if row.shape != spec.shape {
            return Err(RecordError::ShapeDiffers {
                path: path.to_owned(),
                name: spec.name.clone(),
                found: row.shape.clone(),
                wanted: spec.shape.clone(),
            });
        }
        Ok(row)
    }
}

/// Whether the files of the record in `dir` are there in full length: what can be known without reading them.
pub(super) fn check_lengths(dir: &Path, manifest: &Manifest) -> Result<(), RecordError> {
    for part in &manifest.parts {
        check_length(&dir.join(&part.file), part.bytes)?;
    }
    Ok(())
}

pub(super) fn check_length(path: &Path, expected: u64) -> Result<(), RecordError> {
    let metadata = match fs::metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Err(RecordError::MissingFile {
                path: path.to_owned(),
            });
        }
        found => found.map_err(io_error("look at", path))?,
    };
    if metadata.len() == expected {
        return Ok(());
    }
    Err(RecordError::WrongLength {
        path: path.to_owned(),
        expected,
        found: metadata.len(),
    })
}

fn not_one(path: &Path, reason: String) -> RecordError {
    RecordError::NotAManifest {
        path: path.to_owned(),
        reason,
    }
}

/// The name with the longest beginning and end in common: entries differ in their section or in one part of their path.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a String>) -> Option<String> {
    let common = |other: &&String| {
        let same = |(a, b): &(u8, u8)| a == b;
        let start = name.bytes().zip(other.bytes()).take_while(same).count();
        let end = name
            .bytes()
            .rev()
            .zip(other.bytes().rev())
            .take_while(same)
            .count();
        start + end
    };
    names.max_by_key(common).cloned()
}

#[cfg(test)]
mod tests {
    use super::super::assemble::tests::whole;
    use super::*;

    #[test]
    fn a_manifest_comes_back() {
        let manifest = whole();
        let text = manifest.to_json();
        let path = Path::new("m");
        assert_eq!(Manifest::parse(path, &text).unwrap(), manifest);
        assert_eq!(manifest.tensors["a"].pieces[0].offset, 0);
        assert_eq!(manifest.tensors["b"].pieces.len(), 1);
    }

    #[test]
    fn what_is_no_manifest_is_named() {
        let path = Path::new("m");
        let text = whole().to_json();
        let changed = |from: &str, to: &str| {
            assert!(text.contains(from), "{from}");
            Manifest::parse(path, &text.replacen(from, to, 1)).unwrap_err()
        };
        assert!(matches!(
            changed("\"version\":1", "\"version\":2"),
            RecordError::Version {
                found: 2,
                supported: 1,
                ..
            }
        ));
        assert!(matches!(
            changed("\"step\":5", "\"step\":6"),
            RecordError::Checksum { .. }
        ));
        assert!(matches!(
            changed(FORMAT, "other"),
            RecordError::NotAManifest { .. }
        ));
        for end in 0..text.len() {
            let error = Manifest::parse(path, &text[..end]).unwrap_err();
            assert!(matches!(error, RecordError::NotAManifest { .. }), "{error}");
        }
    }

    /// Tables that are wrong although their checksum is right: a foreign program wrote them.
    #[test]
    fn what_leads_outside_is_refused() {
        let refused = |change: fn(&mut Manifest)| {
            let mut manifest = whole();
            change(&mut manifest);
            let text = manifest.to_json();
            Manifest::parse(Path::new("m"), &text)
                .unwrap_err()
                .to_string()
        };
        let escape = refused(|m| m.parts[1].file = "../../etc/passwd".into());
        assert!(escape.contains("rank 1 of 2 has the file `../../etc/passwd`"));
        assert!(refused(|m| m.world_size = 3).contains("3 parts"));
        assert!(refused(|m| m.chunk_bytes = 0).contains("0 bytes"));
        let malformed = "the piece a[4..10] is malformed";
        let second: fn(&mut Manifest) -> &mut PieceRow =
            |m| &mut m.tensors.get_mut("a").expect("in whole()").pieces[1];
        for change in [
            |piece: &mut PieceRow| piece.rank = 2,
            |piece: &mut PieceRow| piece.crc32.clear(),
        ] {
            let mut manifest = whole();
            change(second(&mut manifest));
            let error = manifest.check_form().unwrap_err();
            assert_eq!(error, malformed);
        }
        let gap = refused(|m| m.tensors.get_mut("b").expect("in whole()").shape = vec![11]);
        assert_eq!(
            gap,
            "m contradicts itself: elements 10..11 of `b` are on no rank"
        );
    }
}
