//! Types of elements in tensors and in files.

use burn::tensor::{BoolStore, DType, TensorData};

use super::refuse;
use crate::ZeroOptimizerError;
use crate::record::Dtype;

/// The type in files; bools are stored as one byte each, whatever the device makes of them.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`] for quantized tensors and others that safetensors has no type for.
pub(crate) fn in_file(name: &str, dtype: DType) -> Result<Dtype, ZeroOptimizerError> {
    Ok(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        other => {
            return Err(refuse(format!(
                "{name} is {other:?}, which records do not hold"
            )));
        }
    })
}

/// The tensor in its type in files.
pub(super) fn stored(data: TensorData) -> TensorData {
    match data.dtype {
        DType::Bool(BoolStore::U8 | BoolStore::U32) => {
            data.convert_dtype(DType::Bool(BoolStore::Native))
        }
        _ => data,
    }
}

/// The bytes that go into the file.
pub(crate) fn to_file(data: TensorData) -> Vec<u8> {
    stored(data).bytes.to_vec()
}

/// What a file holds of a tensor of type `dtype`.
pub(crate) fn from_file(bytes: Vec<u8>, shape: Vec<usize>, dtype: DType) -> TensorData {
    let dtype = match dtype {
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        other => other,
    };
    TensorData::from_bytes_vec(bytes, shape, dtype)
}
