//! Loading: a record is read in any slices, by any number of ranks.

use std::cmp::Reverse;
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn_ranks::{BufferDtype, HostBuffer, ProcessGroup};
use half::{bf16, f16};

use super::directory::{Listing, MANIFEST, SyncedFile, parent, run, sync_dir};
use super::entry::{Failure, TensorSlice, TensorSpec};
use super::joint::{end, share};
use super::manifest::{Manifest, Part, SliceRow, TrainingState, header, verify};
use super::{Dtype, MODEL, RecordFault};
use crate::error::ZeroError;

/// A complete record, opened to read any slices of it.
///
/// Holds the manifest and the mebibyte that was read last of which only a part was wanted. Every
/// byte it returns was verified by its checksum.
#[derive(Debug)]
pub struct ShardedRecord {
    path: PathBuf,
    manifest: Arc<Manifest>,
    /// The file that was read last, and its rank: a record may have more files than a process may
    /// open.
    file: Option<(usize, File)>,
    /// The ranks whose files have the right header.
    headers: HashSet<usize>,
    /// The chunk that was read last in part, and where it is once it is verified: rank and place in
    /// its file.
    chunk: Vec<u8>,
    verified: Option<(usize, u64)>,
}

impl ShardedRecord {
    /// The last complete record of the directory `dir`, or the last one of `step`.
    ///
    /// # Errors
    ///
    /// [`RecordFault::NoRecord`] if there is none; an error that names the file if the record is
    /// damaged or of another version.
    pub fn open(dir: &Path, step: Option<u64>) -> Result<Self, ZeroError> {
        let name = Listing::locate(dir, step)?;
        Ok(Self::open_record(&dir.join(name.complete()))?)
    }

    /// The record whose own directory is `path`.
    fn open_record(path: &Path) -> Result<Self, RecordFault> {
        let manifest = Manifest::read(&path.join(MANIFEST))?;
        manifest.check_files(path)?;
        Ok(Self {
            path: path.to_owned(),
            manifest: Arc::new(manifest),
            file: None,
            headers: HashSet::new(),
            chunk: Vec::new(),
            verified: None,
        })
    }

    /// The last complete record of `dir`, or the last one of `step`, opened by all ranks; `None` if
    /// there is none and no step was asked for. Collective: rank 0 chooses, so that all open the
    /// same even while another is being saved.
    ///
    /// # Errors
    ///
    /// On all ranks if on one.
    pub fn open_with(
        dir: &Path,
        group: &dyn ProcessGroup,
        step: Option<u64>,
    ) -> Result<Option<Self>, ZeroError> {
        let chosen = match (group.rank(), step) {
            (0, None) => Listing::read(dir).map(|listing| listing.complete.last().copied()),
            (0, step) => Listing::locate(dir, step).map(Some),
            _ => Ok(None),
        };
        let chosen = share(group, "choose a record", chosen)?;
        let name = chosen.into_iter().flatten().next();
        let opened = name.map(|name| Self::open_record(&dir.join(name.complete())));
        end(group, "open a record", opened.transpose())
    }

    /// The directory of the record.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The state that is no tensor.
    pub fn state(&self) -> &TrainingState {
        &self.manifest.state
    }

    /// The tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = TensorSpec> + '_ {
        let rows = self.manifest.tensors.iter();
        rows.map(|(name, row)| row.spec(name))
    }

    /// Whether it has a tensor of this name.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.manifest.tensors.contains_key(name)
    }

    /// The bytes of a slice, little-endian. Reads only the parts of files that contain them, at
    /// most a mebibyte more on each side of each part, and once the header of each file.
    ///
    /// # Errors
    ///
    /// If the record has no such tensor, or one of another type or shape, or what is in the files
    /// is not what was written.
    pub fn read(&mut self, wanted: &TensorSlice) -> Result<Vec<u8>, ZeroError> {
        let TensorSlice { tensor, range } = wanted;
        Ok(self.read_ranges(tensor, core::slice::from_ref(range))?)
    }

    /// The bytes of several ranges of a tensor, concatenated.
    pub(crate) fn read_ranges(
        &mut self,
        tensor: &TensorSpec,
        ranges: &[Range<usize>],
    ) -> Result<Vec<u8>, RecordFault> {
        let wanted = |range| self.manifest.check_wanted(&self.path, tensor, range);
        // A rank that wants no elements of a tensor, as at stage 3, misses it too.
        wanted(&(0..0))?;
        ranges.iter().try_for_each(wanted)?;
        let elements: usize = ranges.iter().map(Range::len).sum();
        let mut found = vec![0; elements * tensor.element_bytes()];
        let (manifest, mut rest) = (self.manifest.clone(), &mut found[..]);
        let row = &manifest.tensors[&tensor.name];
        for part in ranges.iter().flat_map(|range| row.parts(range)) {
            let (out, after) = rest.split_at_mut(part.wanted.len());
            self.read_part(&part, out)?;
            rest = after;
        }
        Ok(found)
    }

    /// Reads a part of a slice: a whole chunk into its destination, without a copy.
    fn read_part(&mut self, part: &Part, out: &mut [u8]) -> Result<(), RecordFault> {
        let Part { chunk, wanted, .. } = part;
        if chunk == wanted {
            return self.read_chunk(part, out);
        }
        let place = Some((part.slice.rank, part.slice.at + chunk.start as u64));
        if self.verified != place {
            self.verified = None;
            let mut bytes = core::mem::take(&mut self.chunk);
            bytes.resize(chunk.len(), 0);
            self.read_chunk(part, &mut bytes)?;
            (self.chunk, self.verified) = (bytes, place);
        }
        out.copy_from_slice(&self.chunk[wanted.start - chunk.start..wanted.end - chunk.start]);
        Ok(())
    }

    /// Reads all bytes under the checksum of a part, and verifies them.
    fn read_chunk(&mut self, part: &Part, out: &mut [u8]) -> Result<(), RecordFault> {
        let SliceRow {
            rank, at, crc32, ..
        } = part.slice;
        if !self.headers.contains(rank) {
            let header = self.manifest.files[*rank].header;
            let mut bytes = vec![0; header.bytes as usize];
            self.read_verified(*rank, 0, &mut bytes, header.crc32)?;
            self.headers.insert(*rank);
        }
        let at = at + part.chunk.start as u64;
        self.read_verified(*rank, at, out, crc32[part.number])
    }

    /// Reads the bytes of a rank's file from `at` on that have this checksum.
    fn read_verified(
        &mut self,
        rank: usize,
        at: u64,
        out: &mut [u8],
        crc32: u32,
    ) -> Result<(), RecordFault> {
        let path = self.manifest.file(&self.path, rank);
        run("read", &path, || {
            let file = match &mut self.file {
                Some((of, file)) if *of == rank => file,
                other => &mut other.insert((rank, File::open(&path)?)).1,
            };
            file.seek(SeekFrom::Start(at))?;
            file.read_exact(out)
        })?;
        let what = || format!("bytes {at} to {}", at + out.len() as u64);
        verify(&path, what, crc32, out)
    }
}

/// Loads slices of the last complete record in `dir`, or of that of `step`: any slices, at any
/// world size, bit for bit what was saved. Collective: every rank calls it with the slices that it
/// wants, which may overlap those of other ranks.
///
/// `take` is called with the index in `wanted` and the bytes (little-endian) of each slice, one
/// after the other, so that there is never a second copy of the state. Each rank reads only the
/// parts of files that contain its slices. To inspect a record before choosing slices, open it with
/// [`ShardedRecord::open_with`]. All ranks must end reading within the group's deadline of each
/// other.
///
/// # Errors
///
/// On all ranks if on one: [`RecordFault::OtherRank`] on those that did not fail themselves. The
/// error for a record that is damaged, of another version or of another model names the file or the
/// entry; an older record is never loaded instead.
pub fn load_sharded(
    dir: &Path,
    group: &dyn ProcessGroup,
    step: Option<u64>,
    wanted: &[TensorSlice],
    mut take: impl FnMut(usize, Vec<u8>) -> Result<(), Failure>,
) -> Result<TrainingState, ZeroError> {
    let Some(mut record) = ShardedRecord::open_with(dir, group, step)? else {
        return Err(Listing::read(dir)?.no_record(dir, step).into());
    };
    // Missing tensors are found before `take` is called.
    let check = |TensorSlice { tensor, range }: &TensorSlice| {
        record.manifest.check_wanted(&record.path, tensor, range)
    };
    end(group, "look for entries", wanted.iter().try_for_each(check))?;
    let loaded = wanted.iter().enumerate().try_for_each(|(index, wanted)| {
        let TensorSlice { tensor, range } = wanted;
        let bytes = record.read_ranges(tensor, core::slice::from_ref(range))?;
        let not_taken = |reason| tensor.error(format!("was read, but could not be used: {reason}"));
        take(index, bytes).map_err(not_taken)
    });
    end(group, "load a record", loaded)?;
    log::info!("rank {} loaded {}", group.rank(), record.path.display());
    Ok(record.state().clone())
}

/// Writes the model of the last complete record in `dir` into the file `out`: whole tensors by
/// their path in the module, which is what Burn's `SafetensorsStore` reads:
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
/// and so does any other program that reads safetensors. An existing file is replaced atomically,
/// when the new one is on the disk. Costs one read and one write of the model, and a mebibyte of
/// memory. Types are those of the record: [`consolidate_as`] chooses another.
///
/// The weight of a layer with `LinearLayout::Col` is transposed, as Burn's stores write it; its
/// bytes are in memory twice. A record that was written before this was so does not say which
/// weights these are: they are written as they are in memory. Other save mappers are not applied.
///
/// # Errors
///
/// Those of [`ShardedRecord::open`] and [`ShardedRecord::read`], or of the file system;
/// [`RecordFault::OtherModel`] if no entry of the record is in the section `model`.
pub fn consolidate(dir: &Path, out: &Path) -> Result<(), ZeroError> {
    consolidate_floats(dir, out, None)
}

/// [`consolidate`] with all floats in one type, rounded to nearest: DeepSpeed's `zero_to_fp32`, and
/// its `stage3_gather_16bit_weights_on_model_save`. Integers and bools stay.
///
/// # Errors
///
/// Those of [`consolidate`].
pub fn consolidate_as(dir: &Path, out: &Path, floats: BufferDtype) -> Result<(), ZeroError> {
    consolidate_floats(dir, out, Some(floats))
}

fn consolidate_floats(
    dir: &Path,
    out: &Path,
    floats: Option<BufferDtype>,
) -> Result<(), ZeroError> {
    let in_file = |dtype| match (floats, dtype) {
        (Some(floats), Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16) => match floats {
            BufferDtype::F32 => Dtype::F32,
            BufferDtype::F16 => Dtype::F16,
            BufferDtype::Bf16 => Dtype::BF16,
        },
        (_, dtype) => dtype,
    };
    let mut record = ShardedRecord::open(dir, None)?;
    let mut tensors: Vec<_> = record.tensors().collect();
    tensors.retain(|tensor| tensor.name.starts_with(MODEL));
    if tensors.is_empty() {
        let (path, reason) = (record.path, "has no model".to_owned());
        return Err(RecordFault::OtherModel { path, reason }.into());
    }
    // As safetensors orders: by type, and within a type by name, as they are already.
    tensors.sort_by_key(|tensor| Reverse(in_file(tensor.dtype)));
    let transposed = record.state().transposed.clone();
    // The number of columns.
    let transposed = |TensorSpec { name, shape, .. }: &TensorSpec| match shape[..] {
        [_, columns] => transposed.contains(name).then_some(columns),
        _ => None,
    };
    let entry = |tensor: &TensorSpec| {
        let TensorSpec { name, dtype, shape } = tensor;
        let mut shape = shape.clone();
        if transposed(tensor).is_some() {
            shape.reverse();
        }
        (name[MODEL.len()..].to_owned(), in_file(*dtype), shape)
    };
    let header = header(record.state().step, tensors.iter().map(entry));

    // In the directory of `out`, so that it can be renamed to `out`.
    let mut name = OsString::from(".");
    name.push(out.file_name().unwrap_or_default());
    name.push(".partial");
    let temporary = out.with_file_name(name);
    // A killed call may have left one.
    let _ = fs::remove_file(&temporary);
    let write = || {
        let mut file = SyncedFile::create(&temporary)?;
        file.write(&header)?;
        let (manifest, mut bytes) = (record.manifest.clone(), Vec::new());
        for TensorSlice { tensor, range } in tensors.into_iter().map(TensorSlice::whole) {
            let from = tensor.dtype;
            let mut write = |bytes: &[u8]| match floats {
                Some(to) if in_file(from) != from => {
                    let floats = HostBuffer::from_f32(to, to_f32(bytes, from));
                    file.write(floats.as_bytes())
                }
                _ => file.write(bytes),
            };
            if let Some(columns) = transposed(&tensor) {
                let whole = record.read_ranges(&tensor, &[range])?;
                let whole = transpose(&whole, columns, tensor.element_bytes());
                write(&whole)?;
                continue;
            }
            for part in manifest.tensors[&tensor.name].parts(&range) {
                bytes.resize(part.wanted.len(), 0);
                record.read_part(&part, &mut bytes)?;
                write(&bytes)?;
            }
        }
        let bytes = file.finish()?;
        run("rename", &temporary, || fs::rename(&temporary, out))?;
        sync_dir(parent(out))?;
        log::info!("the model of a record in {}: {bytes} bytes", out.display());
        Ok(())
    };
    write().inspect_err(|_| {
        // The first error is returned; the file may not exist.
        let _ = fs::remove_file(&temporary);
    })
}

/// The elements of a matrix with so many columns, column by column.
fn transpose(matrix: &[u8], columns: usize, element_bytes: usize) -> Vec<u8> {
    let mut transposed = Vec::with_capacity(matrix.len());
    for column in 0..columns {
        for row in matrix.chunks_exact(columns * element_bytes) {
            transposed.extend_from_slice(&row[column * element_bytes..][..element_bytes]);
        }
    }
    transposed
}

/// Floats of a file, which are little-endian, in f32.
fn to_f32(bytes: &[u8], dtype: Dtype) -> Vec<f32> {
    fn each<const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> f32) -> Vec<f32> {
        let (elements, rest) = bytes.as_chunks();
        assert!(rest.is_empty(), "chunks of files are cut between elements");
        elements.iter().copied().map(value).collect()
    }
    match dtype {
        Dtype::F64 => each(bytes, |element| f64::from_le_bytes(element) as f32),
        Dtype::F16 => each(bytes, |element| f16::from_le_bytes(element).to_f32()),
        Dtype::BF16 => each(bytes, |element| bf16::from_le_bytes(element).to_f32()),
        _ => each(bytes, f32::from_le_bytes),
    }
}
