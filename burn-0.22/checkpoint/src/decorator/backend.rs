//! `Remat` as a backend of Burn 0.22.1.

use std::marker::PhantomData;

use burn_backend::distributed::DistributedOps;
use burn_backend::{Backend, BackendTypes, TensorMetadata};

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
