//! `Remat` as a backend of Burn 0.22.1.

use std::marker::PhantomData;

use burn_backend::distributed::{
    CollectiveTensor, DistributedConfig, DistributedOps, ReduceOperation,
};
use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, BackendTypes, DType, DeviceId, Shape, TensorMetadata};

use crate::node::handle::Handle;
use crate::node::kind::{Bool, Float, Int, Kind, Quant};
use crate::record::context;

/// A backend whose tensors can leave memory and come back. In the patched burn-dispatch `Flex` is
/// `Remat<burn_flex::Flex>`, below autodiff.
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

/// Refused: a result that other devices still write to is taken over by an `unsafe` function, and
/// this crate has no `unsafe`.
impl<B: Backend> DistributedOps<Self> for Remat<B> {
    fn start_communication_server(_devices: &[B::Device], _config: DistributedConfig) {
        panic!("{NO_COLLECTIVES}");
    }

    fn all_reduce(
        _tensor: FloatTensor<Self>,
        _op: ReduceOperation,
        _device_ids: Vec<DeviceId>,
    ) -> CollectiveTensor<Self> {
        panic!("{NO_COLLECTIVES}");
    }

    fn sync_collective(_device: &B::Device) {
        panic!("{NO_COLLECTIVES}");
    }
}

const NO_COLLECTIVES: &str = "collectives between devices do not pass through the decorated burn-dispatch: train on one device, or take \
                              `[patch.crates-io] burn-dispatch` out of Cargo.toml";

impl<B: Backend, K: Kind<B>> Handle<B, K> {
    /// Whether an operation could write into the storage. No for a managed tensor: a recipe may
    /// need it.
    pub(crate) fn can_mut(&self) -> bool {
        match self {
            Self::Resident(tensor, _) => tensor.can_mut(),
            Self::Managed(_) => false,
        }
    }
}

/// As on 0.21, but for the tape that `rank` offers there: it is for `linear_cross_entropy`, which
/// is not here.
impl<B: Backend, K: Kind<B>> TensorMetadata for Handle<B, K> {
    #[inline]
    fn dtype(&self) -> DType {
        match self {
            Self::Resident(tensor, _) => tensor.dtype(),
            Self::Managed(managed) => managed.node().meta.dtype,
        }
    }

    /// Also how a scope finds its results: they are asked for their shape while it collects them.
    #[inline]
    fn shape(&self) -> Shape {
        match self {
            Self::Resident(tensor, _) if !context::is_collecting() => tensor.shape(),
            _ => self.shape_apart(),
        }
    }

    #[inline]
    fn rank(&self) -> usize {
        match self {
            Self::Resident(tensor, _) => tensor.rank(),
            Self::Managed(managed) => managed.node().meta.shape.num_dims(),
        }
    }

    burn_decorator::metadata_of_release!(Device<B>, Handle::device, Handle::can_mut);
}
