//! `Remat` as a backend of Burn 0.22.1.

use std::marker::PhantomData;

use burn_backend::distributed::DistributedOps;
use burn_backend::tensor::Device;
use burn_backend::{Backend, BackendTypes, DType, Shape, TensorMetadata};

use crate::context;
use crate::handle::Handle;
use crate::kind::{Bool, Float, Int, Kind, Quant};

/// A backend whose tensors can leave memory and come back. In the patched burn-dispatch `Flex` is `Remat<burn_flex::Flex>`, below autodiff.
#[derive(Clone, Copy, Debug, Default)]
pub struct Remat<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Remat<B> {
    burn_decorator::forward_types!(
        B,
        float tensor: Handle<B, Float>,
        int tensor: Handle<B, Int>,
        bool tensor: Handle<B, Bool>,
        quantized tensor: Handle<B, Quant>
    );
}

impl<B: Backend> Backend for Remat<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("remat<{}>", B::name(device))
    }
}

/// Burn's defaults, which Flex has too: no collectives.
impl<B: Backend> DistributedOps<Self> for Remat<B> {}

impl<B: Backend, K: Kind<B>> Handle<B, K> {
    /// Whether an operation could write into the storage. No for a managed tensor: a recipe may need it.
    pub(crate) fn can_mut(&self) -> bool {
        match self {
            Self::Resident(tensor) => tensor.can_mut(),
            Self::Managed(_) => false,
        }
    }
}

/// As on 0.21, but for the tape that `rank` offers there: it is for `linear_cross_entropy`, which is not here.
impl<B: Backend, K: Kind<B>> TensorMetadata for Handle<B, K> {
    #[inline]
    fn dtype(&self) -> DType {
        match self {
            Self::Resident(tensor) => tensor.dtype(),
            Self::Managed(managed) => managed.node().meta().dtype,
        }
    }

    /// Also how a scope finds its results: they are asked for their shape while it collects them.
    #[inline]
    fn shape(&self) -> Shape {
        match self {
            Self::Resident(tensor) if !context::is_collecting() => tensor.shape(),
            _ => self.shape_apart(),
        }
    }

    #[inline]
    fn rank(&self) -> usize {
        match self {
            Self::Resident(tensor) => tensor.rank(),
            Self::Managed(managed) => managed.node().meta().shape.num_dims(),
        }
    }

    burn_decorator::metadata_of_release!(Device<B>, Handle::device, Handle::can_mut);
}
