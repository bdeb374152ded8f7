//! `Sharded` as a backend.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet};

use super::stream;
use super::tape::Tape;

/// A backend whose gradients are reduced, or copied to the host, during backward: `Sharded<Autodiff<Cuda>>`.
///
/// It passes every operation to the inner backend. It only hooks leaves that are parameters of a
/// [`ZeroOptimizer`](crate::ZeroOptimizer) of this thread that has several ranks or gradients
/// in host memory, or of an [`OffloadedAdamW`](crate::OffloadedAdamW). Put it
/// directly outside of `Autodiff`, and inside of autocast: `Autocast<Sharded<Autodiff<Cuda>>>`. Its inner backend, the one of
/// `valid()`, is [`WithHost<Cuda>`](crate::WithHost).
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
