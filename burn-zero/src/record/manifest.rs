//! The manifest: which file has which elements of which tensor, and the state that is no tensor. Pure values.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::RecordError;
use super::directory::{rank_file, run};
use super::entry::TensorSpec;

/// The format name in every manifest.
const FORMAT: &str = "burn-zero sharded record";

/// The version that this program writes and reads.
const VERSION: u32 = 2;

/// Bytes under one checksum, the smallest unit that is read to verify a part of a slice.
pub(super) const CHUNK_BYTES: usize = 1 << 20;

/// What training needs besides tensors, as JSON.
///
/// The same on all ranks: [`save_sharded`](super::save_sharded) refuses it if not. Numbers come back bit for bit. JSON has no
/// NaN and no infinity: `serde_json` makes `null` of them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Updates taken when the record was saved; names the record.
    pub step: u64,
    /// State of the learning-rate scheduler.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub scheduler: Value,
    /// Seed and count of the ranks' own random numbers ([`with_seed`](crate::ZeroOptimizer::with_seed)). The
    /// [`Recorder`](crate::Recorder) fills it in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generator: Option<[u64; 2]>,
    /// All of the optimizer's state that is no tensor, such as step counts: the union of the ranks' trees. The
    /// [`Recorder`](crate::Recorder) fills it in.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub optimizer: Value,
    /// The caller's own state: position in the data, configuration, metrics.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    pub user: Map<String, Value>,
}

impl TrainingState {
    /// State after `step` updates, with nothing else.
    pub fn at_step(step: u64) -> Self {
        Self {
            step,
            ..Self::default()
        }
    }

    /// What must be the same on all ranks, but the optimizer's.
    fn common(&self) -> [(&'static str, Value); 3] {
        [
            ("step", self.step.into()),
            ("scheduler", self.scheduler.clone()),
            ("user state", self.user.clone().into()),
        ]
    }
}

/// The outermost JSON object. The checksum is that of `manifest` as text, so that state is never read from torn JSON.
#[derive(Serialize, Deserialize)]
struct Envelope {
    format: String,
    version: u32,
    crc32: u32,
    manifest: Box<RawValue>,
}

/// A record's table of contents, or what one rank adds to it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    pub world_size: usize,
    pub state: TrainingState,
    /// By name.
    pub tensors: BTreeMap<String, TensorRow>,
}

/// A tensor and its slices in the order of their elements.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TensorRow {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub slices: Vec<SliceRow>,
}

/// Elements `offset..offset + len` of a flattened tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SliceRow {
    pub rank: usize,
    pub offset: usize,
    pub len: usize,
    /// One for each chunk.
    pub crc32: Vec<u32>,
    /// Its place in its file; set by [`Manifest::files`].
    #[serde(skip)]
    pub file_offset: u64,
}

impl SliceRow {
    /// The elements. An end that overflows is saturated, and then fails every check.
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
    /// What a rank adds that has written nothing yet.
    pub fn of_rank(state: TrainingState) -> Self {
        Self {
            world_size: 1,
            state,
            tensors: BTreeMap::new(),
        }
    }

    /// The record whose ranks wrote these, if each element of each tensor is on exactly one of them.
    pub fn assemble(ranks: Vec<Self>) -> Result<Self, RecordError> {
        let world_size = ranks.len();
        let mut ranks = ranks.into_iter();
        let mut manifest = ranks.next().expect("a group has ranks");
        manifest.world_size = world_size;
        for (rank, theirs) in (1..).zip(ranks) {
            manifest.add_state(rank, theirs.state)?;
            for (name, row) in theirs.tensors {
                manifest.add_tensor(rank, name, row)?;
            }
        }
        for row in manifest.tensors.values_mut() {
            row.slices.retain(|slice| slice.len > 0);
            row.slices.sort_by_key(|slice| (slice.offset, slice.rank));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn add_state(&mut self, rank: usize, theirs: TrainingState) -> Result<(), RecordError> {
        let differ = |what, theirs: &Value, ours: &Value| {
            ranks_differ(what, (rank, theirs.to_string()), (0, ours.to_string()))
        };
        for ((what, ours), (_, theirs)) in self.state.common().iter().zip(theirs.common()) {
            if *ours != theirs {
                return Err(differ(what, &theirs, ours));
            }
        }
        let united = unite(&mut self.state.optimizer, theirs.optimizer);
        united.map_err(|(ours, theirs)| differ("optimizer state", &theirs, &ours))
    }

    /// Adds slices of a tensor that a rank has.
    pub fn add_tensor(
        &mut self,
        rank: usize,
        name: String,
        row: TensorRow,
    ) -> Result<(), RecordError> {
        let Some(known) = self.tensors.get_mut(&name) else {
            self.tensors.insert(name, row);
            return Ok(());
        };
        if (known.dtype, &known.shape) != (row.dtype, &row.shape) {
            let kind = |row: &TensorRow| format!("{} {:?}", row.dtype, row.shape);
            let ours = (known.slices[0].rank, kind(known));
            return Err(ranks_differ(
                &format!("`{name}` as"),
                (rank, kind(&row)),
                ours,
            ));
        }
        known.slices.extend(row.slices);
        Ok(())
    }

    /// Checks that every element of every tensor is in exactly one slice, and that each slice has a file and checksums.
    fn check(&self) -> Result<(), RecordError> {
        for (name, row) in &self.tensors {
            let spec = row.spec(name);
            spec.check(&(0..0))?;
            let not_once = |first, end, place: String| {
                Err(spec.error(format!("has elements {first}..{end} {place}")))
            };
            let (mut covered, mut last_rank) = (0, 0);
            for slice in &row.slices {
                let (range, rank) = (slice.range(), slice.rank);
                spec.check(&range)?;
                let chunks = (slice.len * spec.element_bytes()).div_ceil(CHUNK_BYTES);
                if rank >= self.world_size || slice.crc32.len() != chunks {
                    return not_once(range.start, range.end, "in no file".to_owned());
                }
                if range.start > covered {
                    return not_once(covered, range.start, "on no rank".to_owned());
                }
                if range.start < covered {
                    let place = format!("on rank {last_rank} and again on rank {rank}");
                    return not_once(range.start, covered.min(range.end), place);
                }
                (covered, last_rank) = (range.end, rank);
            }
            let elements = spec.elements().unwrap_or(usize::MAX);
            if covered != elements {
                return not_once(covered, elements, "on no rank".to_owned());
            }
        }
        Ok(())
    }

    /// The text of the file.
    pub fn to_json(&self) -> String {
        let unfailing = "strings, integers and JSON values are JSON";
        let manifest = serde_json::value::to_raw_value(self).expect(unfailing);
        let envelope = Envelope {
            format: FORMAT.to_owned(),
            version: VERSION,
            crc32: crc32fast::hash(manifest.get().as_bytes()),
            manifest,
        };
        serde_json::to_string(&envelope).expect(unfailing)
    }

    /// The manifest in the file at `path`.
    pub fn read(path: &Path) -> Result<Self, RecordError> {
        let text = run("read", path, || fs::read(path)).map_err(missing)?;
        let no_manifest = |reason: String| torn(path, format!("is no manifest: {reason}"));
        let no_json = |error: serde_json::Error| no_manifest(error.to_string());
        let envelope: Envelope = serde_json::from_slice(&text).map_err(no_json)?;
        if envelope.format != FORMAT {
            return Err(no_manifest(format!("its format is `{}`", envelope.format)));
        }
        if envelope.version != VERSION {
            let found = envelope.version;
            let reason = format!(
                "is in version {found} of the format; this program reads version {VERSION}"
            );
            return Err(torn(path, reason));
        }
        let manifest = envelope.manifest.get();
        verify(path, "its manifest", envelope.crc32, manifest.as_bytes())?;
        let manifest: Self = serde_json::from_str(manifest).map_err(no_json)?;
        // The checksum is right, so the following errors are possible only in a file of another program.
        let ranks = manifest.world_size;
        let last = path.with_file_name(rank_file(ranks.wrapping_sub(1), ranks));
        if !last.exists() {
            return Err(torn(&last, "is missing".to_owned()));
        }
        let checked = manifest.check();
        checked.map_err(|error| no_manifest(error.to_string()))?;
        Ok(manifest)
    }

    /// The files of the ranks, each with its header and the slices behind it in safetensors' order: the widest elements first, so that all are
    /// aligned.
    pub fn files(&mut self) -> Vec<RankFile> {
        let mut headers: Vec<_> = (0..self.world_size)
            .map(|rank| Header::new(IDENTITY, self.identity(rank)))
            .collect();
        let mut rows: Vec<_> = self.tensors.iter_mut().collect();
        rows.sort_by_key(|(_, row)| Reverse(row.dtype));
        for (name, row) in rows {
            for slice in &mut row.slices {
                let key = slice_key(name, &slice.range());
                slice.file_offset = headers[slice.rank].add(key, row.dtype, vec![slice.len]);
            }
        }
        let headers = headers.into_iter().enumerate();
        let files = headers.map(|(rank, tensors)| {
            let header = tensors.to_bytes();
            RankFile {
                name: rank_file(rank, self.world_size),
                bytes: tensors.end.saturating_add(header.len() as u64),
                header,
            }
        });
        files.collect()
    }

    /// The text in a rank's file that identifies its record and rank.
    pub fn identity(&self, rank: usize) -> String {
        identity(self.state.step, rank, self.world_size)
    }

    /// Checks that the record in `dir` has these elements of the tensor.
    pub fn check_wanted(
        &self,
        dir: &Path,
        wanted: &TensorSpec,
        range: &Range<usize>,
    ) -> Result<(), RecordError> {
        wanted.check(range)?;
        let TensorSpec { name, dtype, shape } = wanted;
        let reason = match self.tensors.get(name) {
            None => {
                let nearest = self.tensors.keys();
                let nearest = nearest.min_by_key(|other| strsim::levenshtein(name, other));
                let nearest = nearest.map_or(String::new(), |it| format!("; nearest is `{it}`"));
                format!("has no entry `{name}`{nearest}")
            }
            Some(row) if row.dtype != *dtype => {
                format!("has `{name}` as {}, but {dtype} is wanted", row.dtype)
            }
            Some(row) if row.shape != *shape => {
                let found = &row.shape;
                format!("has `{name}` of shape {found:?}, but {shape:?} is wanted")
            }
            Some(_) => return Ok(()),
        };
        let path = dir.to_owned();
        Err(RecordError::OtherModel { path, reason })
    }
}

/// The file of one rank.
#[derive(Debug)]
pub(super) struct RankFile {
    pub name: String,
    pub header: Vec<u8>,
    /// Length of the file.
    pub bytes: u64,
}

impl RankFile {
    /// Checks that the file in `dir` exists with its full length, without reading it.
    pub fn check_length(&self, dir: &Path) -> Result<(), RecordError> {
        let path = &dir.join(&self.name);
        let found = run("look at", path, || Ok(fs::metadata(path)?.len())).map_err(missing)?;
        let written = self.bytes;
        if found == written {
            return Ok(());
        }
        let reason = format!("holds {found} bytes, but {written} were written");
        Err(torn(path, reason))
    }
}

/// The key of the safetensors metadata with the file's [`identity`].
pub(super) const IDENTITY: &str = "burn-zero";

pub(super) fn identity(step: u64, rank: usize, world_size: usize) -> String {
    format!("step {step}, rank {rank} of {world_size}")
}

/// Name of a slice in its file, such as `model/weight[100..150]`.
pub(super) fn slice_key(name: &str, range: &Range<usize>) -> String {
    format!("{name}[{}..{}]", range.start, range.end)
}

/// A safetensors header of contiguous tensors. Its bytes are a function of what was added, in every program: the fields are in order.
pub(super) struct Header {
    entries: BTreeMap<String, HeaderEntry>,
    /// Bytes of the tensors.
    pub end: u64,
}

#[derive(Serialize)]
#[serde(untagged)]
enum HeaderEntry {
    Metadata(BTreeMap<&'static str, String>),
    Tensor {
        dtype: Dtype,
        shape: Vec<usize>,
        data_offsets: [u64; 2],
    },
}

impl Header {
    /// With one entry of metadata.
    pub fn new(key: &'static str, value: String) -> Self {
        let metadata = HeaderEntry::Metadata(BTreeMap::from([(key, value)]));
        Self {
            entries: BTreeMap::from([("__metadata__".to_owned(), metadata)]),
            end: 0,
        }
    }

    /// Adds a tensor behind the others, and returns its offset behind the header.
    pub fn add(&mut self, name: String, dtype: Dtype, shape: Vec<usize>) -> u64 {
        let elements = shape.iter().product::<usize>();
        let start = self.end;
        // Saturated in a file of another program: no file is as long.
        self.end = start.saturating_add((elements * (dtype.bitsize() / 8)) as u64);
        let entry = HeaderEntry::Tensor {
            dtype,
            shape,
            data_offsets: [start, self.end],
        };
        self.entries.insert(name, entry);
        start
    }

    /// Length and text, padded so that the first tensor is aligned.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(&self.entries).expect("names and numbers are JSON");
        text.resize(text.len().next_multiple_of(size_of::<u64>()), b' ');
        [&(text.len() as u64).to_le_bytes(), &text[..]].concat()
    }
}

fn ranks_differ(
    what: &str,
    (rank, theirs): (usize, String),
    (other, ours): (usize, String),
) -> RecordError {
    RecordError::RanksDiffer {
        difference: format!("rank {rank} has {what} {theirs}, rank {other} {ours}"),
    }
}

/// Adds the missing keys of `theirs` to `ours`, because each rank has the parameters of its shard. `Err` has the first two values that
/// differ.
pub(crate) fn unite(ours: &mut Value, theirs: Value) -> Result<(), (Value, Value)> {
    match (ours, theirs) {
        (ours @ Value::Null, theirs) => *ours = theirs,
        (_, Value::Null) => {}
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                unite(ours.entry(key).or_insert(Value::Null), value)?;
            }
        }
        (ours, theirs) if *ours == theirs => {}
        (ours, theirs) => return Err((ours.clone(), theirs)),
    }
    Ok(())
}

/// Checks the CRC-32 of `bytes`.
pub(super) fn verify(
    path: &Path,
    what: &str,
    written: u32,
    bytes: &[u8],
) -> Result<(), RecordError> {
    let found = crc32fast::hash(bytes);
    if found == written {
        return Ok(());
    }
    let reason = format!("has checksum {found:08x} of {what}, but {written:08x} was written");
    Err(torn(path, reason))
}

/// The error for a file of a record that cannot be read.
fn missing(error: RecordError) -> RecordError {
    match &error {
        RecordError::Io { path, .. } if error.is_not_found() => torn(path, "is missing".to_owned()),
        _ => error,
    }
}

pub(super) fn torn(path: &Path, reason: String) -> RecordError {
    RecordError::Torn {
        path: path.to_owned(),
        reason,
    }
}
