//! Casts an operand to a type.

use burn_backend::{Backend, DType, FloatDType, Scalar, TensorMetadata, tensor::FloatTensor};

use super::check::ensure_dtype;
use crate::cast::is_low;
use crate::policy::{Mode, Policy};

/// A scalar that is about to be written into a tensor of type `dtype`, kept finite if it is and the
/// mode lowers tensors.
#[inline]
pub(crate) fn within<P: Policy>(value: Scalar, dtype: Option<FloatDType>) -> Scalar {
    let lowers = || Mode::current::<P>().low().is_some();
    match (value, dtype) {
        (Scalar::Float(x), Some(dtype)) if x.is_finite() && is_low(dtype) && lowers() => {
            let range = dtype.finfo();
            Scalar::Float(x.clamp(range.min, range.max))
        }
        _ => value,
    }
}

/// Casts a tensor of the inner backend to `target`, if that is given and differs from its type.
#[inline]
pub(crate) fn bring<B: Backend>(
    tensor: FloatTensor<B>,
    target: Option<FloatDType>,
) -> FloatTensor<B> {
    match target {
        Some(target) if tensor.dtype() != DType::from(target) => {
            if is_low(target) {
                ensure_dtype::<B>(&tensor, target);
            }
            B::float_cast(tensor, target)
        }
        _ => tensor,
    }
}
