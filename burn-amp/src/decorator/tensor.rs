//! The decorator's float tensor.

use std::sync::Arc;

use burn_backend::{Backend, BackendTypes, FloatDType, TensorMetadata};

use super::bring::bring;
use super::origin::{MOST_STEPS, Origin};
use crate::cast::{Lineage, is_low};

/// A float tensor of [`Autocast`](crate::Autocast): the inner backend's tensor, which reports its
/// own type, and its [`Lineage`].
#[derive(Clone, Debug)]
pub struct AutocastTensor<T> {
    pub(crate) tensor: T,
    pub(crate) lineage: Lineage,
    /// How the tensor was computed, where an operation that takes it can use that.
    pub(super) origin: Option<Arc<Origin<T>>>,
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
        Self {
            tensor,
            lineage,
            origin: None,
        }
    }

    /// With what an operation that takes the tensor can use.
    pub(super) fn with_origin(mut self, origin: Origin<T>) -> Self {
        self.origin = Some(Arc::new(origin));
        self
    }
}

impl<T: TensorMetadata> AutocastTensor<T> {
    /// The result of an operation. Low results share one cast to f32 among all that need it, so
    /// that their gradients are added in f32 and rounded once.
    #[inline]
    pub(super) fn result(tensor: T, lineage: Lineage) -> Self {
        let low = is_low(tensor.dtype().into());
        let result = Self::with_lineage(tensor, lineage);
        if low {
            result.with_origin(Origin::stored())
        } else {
            result
        }
    }

    /// Whether the tensor has 16 bits.
    pub(super) fn is_low(&self) -> bool {
        is_low(self.tensor.dtype().into())
    }

    /// Through how many operations the tensor would be computed again in f32.
    pub(super) fn steps(&self) -> u8 {
        self.origin.as_ref().map_or(0, |origin| origin.steps())
    }

    /// The operand of a computation that may be repeated in f32: without its own where that would
    /// keep too many tensors.
    pub(super) fn kept(self) -> Self {
        if self.steps() < MOST_STEPS {
            self
        } else {
            Self::with_lineage(self.tensor, self.lineage)
        }
    }

    /// The tensor in f32, if it is low: computed in f32 from the operands of the operation that it
    /// comes from, where those are known.
    pub(super) fn raised<B: BackendTypes<FloatTensorPrimitive = T> + Backend>(self) -> T {
        if !self.is_low() {
            return self.tensor;
        }
        match self.origin.as_deref() {
            Some(Origin::Low(low)) => {
                low.wide(|| B::float_cast(self.tensor.clone(), FloatDType::F32))
            }
            _ => B::float_cast(self.tensor, FloatDType::F32),
        }
    }

    /// The inner backend's tensor, cast to `target` if that is given and differs from its type.
    #[inline]
    pub(super) fn brought<B: BackendTypes<FloatTensorPrimitive = T> + Backend>(
        self,
        target: Option<FloatDType>,
    ) -> T {
        if target == Some(FloatDType::F32) && self.is_low() {
            self.raised::<B>()
        } else {
            bring::<B>(self.tensor, target)
        }
    }
}

impl<T: TensorMetadata + 'static> TensorMetadata for AutocastTensor<T> {
    burn_decorator::forward_metadata!(tensor, wrapped by Self::new);
}
