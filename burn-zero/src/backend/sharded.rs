//! `Sharded` as a backend.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet};

use super::stream;
use super::tape::Tape;

/// A backend whose gradients leave for their shards, or for the host, while backward goes on: `Sharded<Autodiff<Cuda>>`.
///
/// It is the inner backend, tensor for tensor, but for the leaves that a
/// [`ZeroOptimizer`](crate::ZeroOptimizer) of this thread knows as parameters, where it has more than one rank or its gradients are
/// in host memory, or an [`OffloadedAdamW`](crate::OffloadedAdamW). Put it
/// directly outside of `Autodiff`, and inside of autocast: `Autocast<Sharded<Autodiff<Cuda>>>`. What `inner()` and `valid()`
/// give is on [`WithHost<Cuda>`](crate::WithHost).
///
/// See [what happens to a gradient](crate#what-happens-to-a-gradient).
#[derive(Clone, Copy, Debug, Default)]
pub struct Sharded<A> {
    inner: PhantomData<A>,
}

impl<A: Tape> BackendTypes for Sharded<A> {
    burn_decorator::forward_types!(A, float tensor: A::FloatTensorPrimitive);
}

#[deny(clippy::missing_trait_methods)]
impl<A: Tape> Backend for Sharded<A> {
    burn_decorator::forward_device!(A, seed: stream::seed::<A>);

    fn name(device: &Self::Device) -> String {
        format!("sharded<{}>", A::name(device))
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        A::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        A::dtype_usage(device, dtype)
    }
}
