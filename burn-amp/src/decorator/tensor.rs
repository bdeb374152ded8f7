//! The decorator's float tensor.

use burn_backend::TensorMetadata;

use crate::cast::Lineage;

/// A float tensor of [`Autocast`](crate::Autocast): the inner backend's tensor, which reports its own type, and its [`Lineage`].
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
