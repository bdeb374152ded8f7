//! A backend that can leave a tensor in host memory.

mod compute;
mod ops;
mod tensor;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, TensorData};

pub use tensor::{HostTensor, PlacedTensor};

/// The backend `B`, some of whose float tensors are in host memory: gradients that left the device during backward and whose
/// optimizer is on the host. It is what [`Sharded`](super::Sharded) has for its inner backend, so that whoever stands between
/// backward and the optimizer (loss scalers, accumulation, clipping) works on such gradients where they are.
///
/// What those layers do is computed on the host, for tensors of f32: adding, scaling, sums, casts, reading, looking for what is
/// not finite. A sum is of f64 terms, rounded once; all else has the bits of the device's f32. Any other operation first brings its
/// operands to the device, where all results stay. A tensor that is on the device costs nothing more than without this layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct WithHost<B> {
    inner: PhantomData<B>,
}

impl<B: Backend> BackendTypes for WithHost<B> {
    burn_decorator::forward_types!(B, float tensor: PlacedTensor<B::FloatTensorPrimitive, B::Device>);
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for WithHost<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        B::name(device)
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
}

thread_local! {
    static STAYS: Cell<bool> = const { Cell::new(false) };
}

/// A tensor of data that stays in host memory, if the backend has a [`WithHost`] in it; otherwise one on the device.
pub(crate) fn on_host<I: Backend>(
    data: TensorData,
    device: &I::Device,
) -> burn_backend::tensor::FloatTensor<I> {
    STAYS.set(true);
    let tensor = I::float_from_data(data, device);
    STAYS.set(false);
    tensor
}
