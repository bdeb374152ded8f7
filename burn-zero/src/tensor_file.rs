//! A safetensors file whose tensors are read one by one.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

use burn::tensor::{BoolStore, DType, TensorData};
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::ZeroError;
use crate::record::{Dtype, RecordFault, run};

/// A safetensors file, whose tensors are read one by one.
///
/// ```
/// use burn_zero::TensorFile;
///
/// # let folder = tempfile::tempdir().unwrap();
/// # let path = folder.path().join("model.safetensors");
/// # let elements = [1.0f32, 2.0].map(f32::to_le_bytes).concat();
/// # let view = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &elements).unwrap();
/// # safetensors::serialize_to_file([("norm.weight", view)], None, &path).unwrap();
/// let file = TensorFile::open(&path)?;
/// assert_eq!(file.names().collect::<Vec<_>>(), ["norm.weight"]);
/// assert_eq!(file.shape("norm.weight"), Some(&[2][..]));
/// assert_eq!(file.read("norm.weight")?.to_vec::<f32>().unwrap(), [1.0, 2.0]);
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
#[derive(Clone, Debug)]
pub struct TensorFile {
    path: PathBuf,
    tensors: BTreeMap<String, TensorInfo>,
    /// Where the first tensor begins.
    start: u64,
}

impl TensorFile {
    /// Reads the header.
    ///
    /// # Errors
    ///
    /// [`RecordFault::Io`], [`RecordFault::Torn`] for a file of another format, or of another
    /// length than its header tells.
    pub fn open(path: &Path) -> Result<Self, ZeroError> {
        let torn = |reason| RecordFault::Torn {
            path: path.to_owned(),
            reason,
        };
        let (header, bytes) = run("read", path, || {
            let mut file = File::open(path)?;
            let all = file.metadata()?.len();
            let (mut length, mut header) = ([0; 8], Vec::new());
            file.read_exact(&mut length)?;
            let length = u64::from_le_bytes(length);
            // Another number is no length: the file is of another format, and the header stays
            // empty.
            if length <= all.saturating_sub(8) {
                file.take(length).read_to_end(&mut header)?;
            }
            Ok((header, all))
        })?;
        // `SafeTensors` requires the bytes of all tensors too.
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| torn(format!("is no safetensors file: {error}")))?;
        let start = 8 + header.len() as u64;
        let expected = start + metadata.data_len() as u64;
        if bytes != expected {
            let reason = format!("has {bytes} bytes, but its header tells of {expected}");
            return Err(torn(reason).into());
        }
        let tensors = metadata.tensors().into_iter();
        Ok(Self {
            path: path.to_owned(),
            tensors: tensors.map(|(name, info)| (name, info.clone())).collect(),
            start,
        })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The names of its tensors, in alphabetical order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The shape of a tensor, if there is one of this name.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.info(name)?.shape)
    }

    pub(crate) fn info(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// A tensor in the file's type.
    ///
    /// # Errors
    ///
    /// [`RecordFault::Io`]; [`RecordFault::OtherModel`] if there is no tensor of this name, or it
    /// has a type that no parameter has.
    pub fn read(&self, name: &str) -> Result<TensorData, ZeroError> {
        let refused = |reason: &str| RecordFault::OtherModel {
            path: self.path.clone(),
            reason: format!("{reason} {name}"),
        };
        let info = self.info(name).ok_or_else(|| refused("has no tensor"))?;
        let dtype = on_host(info.dtype).ok_or_else(|| refused("has another type of numbers in"))?;
        let (start, end) = info.data_offsets;
        let mut bytes = vec![0; end - start];
        run("read", &self.path, || {
            let mut file = File::open(&self.path)?;
            file.seek(SeekFrom::Start(self.start + start as u64))?;
            file.read_exact(&mut bytes)
        })?;
        Ok(TensorData::from_bytes_vec(bytes, info.shape.clone(), dtype))
    }
}

/// The type on the host; `None` for types that no parameter has.
pub(crate) fn on_host(dtype: Dtype) -> Option<DType> {
    Some(match dtype {
        Dtype::F64 => DType::F64,
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::I64 => DType::I64,
        Dtype::I32 => DType::I32,
        Dtype::I16 => DType::I16,
        Dtype::I8 => DType::I8,
        Dtype::U64 => DType::U64,
        Dtype::U32 => DType::U32,
        Dtype::U16 => DType::U16,
        Dtype::U8 => DType::U8,
        Dtype::BOOL => DType::Bool(BoolStore::Native),
        _ => return None,
    })
}
