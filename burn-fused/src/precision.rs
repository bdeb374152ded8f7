//! Casts between the operands' type and f32.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};

/// Whether numbers of this type have 16 bits.
pub(crate) fn is_half(dtype: DType) -> bool {
    matches!(dtype, DType::F16 | DType::BF16)
}

/// Casts to f32, if the tensor has 16 bits.
pub(crate) fn raise<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    if is_half(tensor.dtype()) {
        B::float_cast(tensor, FloatDType::F32)
    } else {
        tensor
    }
}

/// Casts to `dtype`, if the tensor has another type.
pub(crate) fn cast<B: Backend>(tensor: FloatTensor<B>, dtype: DType) -> FloatTensor<B> {
    if tensor.dtype() == dtype {
        tensor
    } else {
        B::float_cast(tensor, dtype.into())
    }
}
