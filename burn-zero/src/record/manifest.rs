//! The manifest: which file has which elements of which tensor, and the state that is no tensor.
//! Pure values.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::RecordFault;
use super::directory::{rank_file, run};
use super::entry::{CHUNK_BYTES, TensorSpec};

/// The format name in every manifest.
const FORMAT: &str = "burn-zero sharded record";

/// The version that this program writes and reads.
const VERSION: u32 = 5;

/// What training needs besides tensors, as JSON.
///
/// The same on all ranks: [`save_sharded`](super::save_sharded) refuses it if not. Numbers are
/// loaded bit for bit. JSON has no NaN and no infinity: `serde_json` writes `null` for them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingState {
    /// Updates taken when the record was saved; names the record.
    pub step: u64,
    /// State of the learning-rate scheduler.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub scheduler: Value,
    /// All of the optimizer's state that is no tensor, such as step counts: the union of the ranks'
    /// trees. The [`Recorder`](crate::Recorder) fills it in.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub optimizer: Value,
    /// The names of the matrices that [`consolidate`](crate::consolidate) transposes, as Burn's
    /// stores do: weights of layers with `LinearLayout::Col`. The [`Recorder`](crate::Recorder)
    /// fills it in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub transposed: Vec<String>,
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
}

/// The outermost JSON object. The checksum is that of `manifest` as text, so that state is never
/// read from torn JSON.
#[derive(Serialize, Deserialize)]
struct Envelope {
    format: String,
    version: u32,
    crc32: u32,
    manifest: Box<RawValue>,
}

/// A record's table of contents, or one rank's part of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    /// By rank.
    pub files: Vec<RankFile>,
    pub state: TrainingState,
    /// By name.
    pub tensors: BTreeMap<String, TensorRow>,
}

/// The file of one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RankFile {
    /// Its length.
    pub bytes: u64,
    /// Its safetensors header, from the first byte of the file on.
    pub header: HeaderRow,
}

/// The header of a rank's file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HeaderRow {
    pub bytes: u64,
    pub crc32: u32,
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
    /// Where the elements begin in the rank's file.
    pub at: u64,
    /// One checksum for each [`CHUNK_BYTES`] of the elements, the last for the rest.
    pub crc32: Vec<u32>,
}

/// Elements of a slice that are read together: those under one checksum, or some of them. Bytes are
/// counted from the slice's first.
pub(super) struct Part<'a> {
    pub slice: &'a SliceRow,
    /// Which of the slice's checksums it is under.
    pub number: usize,
    /// The bytes under that checksum.
    pub chunk: Range<usize>,
    /// The bytes to read.
    pub wanted: Range<usize>,
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

    /// The parts of these elements, in order.
    pub fn parts(&self, elements: &Range<usize>) -> impl Iterator<Item = Part<'_>> {
        let width = self.dtype.bitsize() / 8;
        let Range { start, end } = *elements;
        let after = |slice: &SliceRow| slice.range().end <= start;
        let first = self.slices.partition_point(after);
        let slices = self.slices[first..].iter();
        let slices = slices.take_while(move |slice| start < end && slice.offset < end);
        slices.flat_map(move |slice| {
            let (from, to) = (start.max(slice.offset), end.min(slice.range().end));
            let wanted = (from - slice.offset) * width..(to - slice.offset) * width;
            let numbers = wanted.start / CHUNK_BYTES..wanted.end.div_ceil(CHUNK_BYTES);
            numbers.map(move |number| {
                let first = number * CHUNK_BYTES;
                let chunk = first..(slice.len * width).min(first + CHUNK_BYTES);
                Part {
                    slice,
                    number,
                    wanted: wanted.start.max(chunk.start)..wanted.end.min(chunk.end),
                    chunk,
                }
            })
        })
    }
}

impl Manifest {
    /// The manifest of a record from those of its ranks, if each element of each tensor is on
    /// exactly one rank.
    pub fn assemble(ranks: Vec<Self>) -> Result<Self, RecordFault> {
        let mut ranks = ranks.into_iter();
        let mut manifest = ranks.next().expect("a group has ranks");
        let mut trees = vec![manifest.state.optimizer.take()];
        for (rank, mut theirs) in (1..).zip(ranks) {
            manifest.files.extend(theirs.files);
            trees.push(theirs.state.optimizer.take());
            manifest.check_state(rank, theirs.state)?;
            for (name, row) in theirs.tensors {
                manifest.add_tensor(rank, name, row)?;
            }
        }
        let united = unite(trees);
        manifest.state.optimizer = united.map_err(|[ours, theirs]| {
            let [ours, theirs] = [ours, theirs].map(|(rank, value)| (rank, value.to_string()));
            ranks_differ("optimizer state", theirs, ours)
        })?;
        for row in manifest.tensors.values_mut() {
            row.slices.retain(|slice| slice.len > 0);
            row.slices.sort_by_key(|slice| (slice.offset, slice.rank));
        }
        manifest.check()?;
        Ok(manifest)
    }

    fn check_state(&self, rank: usize, theirs: TrainingState) -> Result<(), RecordFault> {
        let ours = &self.state;
        for (what, theirs, ours) in [
            ("step", theirs.step.into(), ours.step.into()),
            ("scheduler", theirs.scheduler, ours.scheduler.clone()),
            (
                "transposed matrices",
                theirs.transposed.into(),
                ours.transposed.clone().into(),
            ),
            ("user state", theirs.user.into(), ours.user.clone().into()),
        ] {
            if ours != theirs {
                let (theirs, ours) = (theirs.to_string(), ours.to_string());
                return Err(ranks_differ(what, (rank, theirs), (0, ours)));
            }
        }
        Ok(())
    }

    /// Adds slices of a tensor that a rank has.
    pub fn add_tensor(
        &mut self,
        rank: usize,
        name: String,
        row: TensorRow,
    ) -> Result<(), RecordFault> {
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

    /// Checks that every element of every tensor is in exactly one slice, and that each slice is in
    /// a file.
    fn check(&self) -> Result<(), RecordFault> {
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
                let bytes = slice.len * spec.element_bytes();
                let is_in = |file: &RankFile| slice.at.saturating_add(bytes as u64) <= file.bytes;
                if !self.files.get(rank).is_some_and(is_in) {
                    return not_once(range.start, range.end, "in no file".to_owned());
                }
                if slice.crc32.len() != bytes.div_ceil(CHUNK_BYTES) {
                    let place = "without all of their checksums".to_owned();
                    return not_once(range.start, range.end, place);
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
    pub fn read(path: &Path) -> Result<Self, RecordFault> {
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
        verify(
            path,
            || "its manifest".to_owned(),
            envelope.crc32,
            manifest.as_bytes(),
        )?;
        let manifest: Self = serde_json::from_str(manifest).map_err(no_json)?;
        // The checksum is right, so this error is possible only in a file of another program.
        let checked = manifest.check();
        checked.map_err(|error| no_manifest(error.to_string()))?;
        Ok(manifest)
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }

    /// The file of a rank of the record in `dir`.
    pub fn file(&self, dir: &Path, rank: usize) -> PathBuf {
        dir.join(rank_file(rank, self.files.len()))
    }

    /// Checks that the files in `dir` exist with their full lengths, without reading them.
    pub fn check_files(&self, dir: &Path) -> Result<(), RecordFault> {
        for (rank, file) in self.files.iter().enumerate() {
            let (path, written) = (&self.file(dir, rank), file.bytes);
            let found = run("look at", path, || Ok(fs::metadata(path)?.len())).map_err(missing)?;
            if found != written {
                let reason = format!("holds {found} bytes, but {written} were written");
                return Err(torn(path, reason));
            }
            if file.header.bytes > written {
                return Err(torn(path, "is shorter than its header".to_owned()));
            }
        }
        Ok(())
    }

    /// Checks that the record in `dir` has these elements of the tensor.
    pub fn check_wanted(
        &self,
        dir: &Path,
        wanted: &TensorSpec,
        range: &Range<usize>,
    ) -> Result<(), RecordFault> {
        wanted.check(range)?;
        let TensorSpec { name, dtype, shape } = wanted;
        let reason = match self.tensors.get(name) {
            None => format!("has no entry `{name}`"),
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
        Err(RecordFault::OtherModel { path, reason })
    }
}

/// Name of a slice in its file, such as `model/weight[100..150]`.
pub(super) fn slice_key(name: &str, range: &Range<usize>) -> String {
    format!("{name}[{}..{}]", range.start, range.end)
}

/// A safetensors header of contiguous tensors with different names, and the step as metadata:
/// length and text, padded so that the first tensor is aligned.
pub(super) fn header(
    step: u64,
    tensors: impl Iterator<Item = (String, Dtype, Vec<usize>)>,
) -> Vec<u8> {
    let mut end = 0;
    let tensors = tensors.map(|(name, dtype, shape)| {
        let start = end;
        end += shape.iter().product::<usize>() * (dtype.bitsize() / 8);
        let data_offsets = (start, end);
        let info = TensorInfo {
            dtype,
            shape,
            data_offsets,
        };
        (name, info)
    });
    let metadata = HashMap::from([("step".to_owned(), step.to_string())]);
    let header = Metadata::new(Some(metadata), tensors.collect());
    let header = header.expect("tensors of whole bytes, one behind the other");
    let mut text = serde_json::to_vec(&header).expect("names and numbers are JSON");
    text.resize(text.len().next_multiple_of(size_of::<u64>()), b' ');
    [&(text.len() as u64).to_le_bytes(), &text[..]].concat()
}

fn ranks_differ(
    what: &str,
    (rank, theirs): (usize, String),
    (other, ours): (usize, String),
) -> RecordFault {
    RecordFault::RanksDiffer {
        difference: format!("rank {rank} has {what} {theirs}, rank {other} {ours}"),
    }
}

/// The union of the ranks' trees, because each rank has only the parameters of its shard. `Err` has
/// the first two ranks that differ, each with its value.
pub(crate) fn unite(trees: Vec<Value>) -> Result<Value, [(usize, Value); 2]> {
    let mut united = Value::Null;
    for (rank, theirs) in trees.iter().enumerate() {
        let Err(differ) = add(&mut united, theirs.clone()) else {
            continue;
        };
        let mut earlier = trees[..rank].iter().enumerate();
        let (other, (ours, theirs)) = earlier
            .find_map(|(other, ours)| Some((other, add(&mut ours.clone(), theirs.clone()).err()?)))
            .unwrap_or((0, differ));
        return Err([(other, ours), (rank, theirs)]);
    }
    Ok(united)
}

/// Adds the missing keys of `theirs` to `ours`. `Err` has the first two values that differ.
fn add(ours: &mut Value, theirs: Value) -> Result<(), (Value, Value)> {
    match (ours, theirs) {
        (ours @ Value::Null, theirs) => *ours = theirs,
        (_, Value::Null) => {}
        (Value::Object(ours), Value::Object(theirs)) => {
            for (key, value) in theirs {
                add(ours.entry(key).or_insert(Value::Null), value)?;
            }
        }
        (Value::Array(ours), Value::Array(theirs)) if ours.len() == theirs.len() => {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                add(ours, theirs)?;
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
    what: impl FnOnce() -> String,
    written: u32,
    bytes: &[u8],
) -> Result<(), RecordFault> {
    let found = crc32fast::hash(bytes);
    if found == written {
        return Ok(());
    }
    let reason = format!(
        "has checksum {found:08x} of {}, but {written:08x} was written",
        what()
    );
    Err(torn(path, reason))
}

/// The error for a file of a record that cannot be read.
fn missing(error: RecordFault) -> RecordFault {
    match &error {
        RecordFault::Io { path, .. } if error.is_not_found() => torn(path, "is missing".to_owned()),
        _ => error,
    }
}

pub(super) fn torn(path: &Path, reason: String) -> RecordFault {
    RecordFault::Torn {
        path: path.to_owned(),
        reason,
    }
}
