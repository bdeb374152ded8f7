//! The decorator's float tensor.

use burn_backend::{Backend, DType, FloatDType, Scalar, TensorMetadata, tensor::FloatTensor};

use super::check::ensure_dtype;
use crate::cast::{Lineage, is_low};

/// A float tensor of [`Autocast`](crate::Autocast): the inner backend's, with its true and visible type, and where it comes
/// from.
#[derive(Clone, Debug)]
pub struct AutocastTensor<T> {
    pub(crate) tensor: T,
    pub(crate) lineage: Lineage,
}

impl<T> AutocastTensor<T> {
    /// Wraps a tensor of the inner backend.
    pub fn new(tensor: T) -> Self {
        Self::with_lineage(tensor, Lineage::Forward)
    }

    /// The inner backend's tensor.
    pub fn into_inner(self) -> T {
        self.tensor
    }

    /// The inner backend's tensor.
    pub fn inner(&self) -> &T {
        &self.tensor
    }

    /// Whether the tensor is a gradient or was computed from one, and so is never lowered.
    pub fn lineage(&self) -> Lineage {
        self.lineage
    }

    #[inline]
    pub(crate) fn with_lineage(tensor: T, lineage: Lineage) -> Self {
        Self { tensor, lineage }
    }
}

impl<T: TensorMetadata + 'static> TensorMetadata for AutocastTensor<T> {
    burn_decorator::forward_metadata!(tensor, wrapped by Self::new);
}

/// A scalar that is about to be written into a tensor of type `dtype`, kept finite if it is.
#[inline]
pub(crate) fn within(value: Scalar, dtype: Option<FloatDType>) -> Scalar {
    match (value, dtype) {
        (Scalar::Float(x), Some(dtype)) if x.is_finite() && is_low(dtype) => {
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
