//! `Autocast` as a backend.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, ExecutionError, TensorData};

use super::tensor::AutocastTensor;
use crate::policy::{Bf16, Policy};

/// A backend that picks the precision of every operation by itself: `Autocast<Autodiff<Cuda>>`.
///
/// Parameters, gradients and optimizer state stay f32; each operation runs in the class that
/// [`op_table`](crate::op_table) gives it under policy `P`. Put it outside of `Autodiff`: the casts are then part of the
/// graph, saved activations are in the low type, and backward operations run in the type of their forward. This is
/// PyTorch's order and reason.
///
/// Nothing else changes in user code: the backend alias is the only line.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::{Linear, LinearConfig};
/// use burn::tensor::{DType, Tensor};
/// use burn_amp::Autocast;
/// use burn_flex::Flex;
///
/// type B = Autocast<Autodiff<Flex>>;
///
/// let device = Default::default();
/// let linear: Linear<B> = LinearConfig::new(4, 4).init(&device);
/// let y = linear.forward(Tensor::<B, 2>::ones([2, 4], &device));
/// assert_eq!(y.dtype(), DType::BF16);
///
/// let loss = y.mean();
/// assert_eq!(loss.dtype(), DType::F32);
/// let grads = loss.backward();
/// assert_eq!(linear.weight.grad(&grads).unwrap().dtype(), DType::F32);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Autocast<B, P = Bf16> {
    inner: PhantomData<B>,
    policy: PhantomData<P>,
}

impl<B: Backend, P: Policy> BackendTypes for Autocast<B, P> {
    type Device = B::Device;

    type FloatTensorPrimitive = AutocastTensor<B::FloatTensorPrimitive>;
    type FloatElem = B::FloatElem;

    type IntTensorPrimitive = B::IntTensorPrimitive;
    type IntElem = B::IntElem;

    type BoolTensorPrimitive = B::BoolTensorPrimitive;
    type BoolElem = B::BoolElem;

    type QuantizedTensorPrimitive = B::QuantizedTensorPrimitive;
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend, P: Policy> Backend for Autocast<B, P> {
    fn ad_enabled(device: &Self::Device) -> bool {
        B::ad_enabled(device)
    }

    fn memory_persistent_allocations<
        Output: Send,
        Input: Send,
        Func: Fn(Input) -> Output + Send,
    >(
        device: &Self::Device,
        input: Input,
        func: Func,
    ) -> Output {
        B::memory_persistent_allocations(device, input, func)
    }

    fn memory_cleanup(device: &Self::Device) {
        B::memory_cleanup(device);
    }

    fn name(device: &Self::Device) -> String {
        format!("autocast<{}, {}>", B::name(device), P::name())
    }

    fn seed(device: &Self::Device, seed: u64) {
        B::seed(device, seed);
    }

    fn sync(device: &Self::Device) -> Result<(), ExecutionError> {
        B::sync(device)
    }

    fn staging<'a, Iter>(data: Iter, device: &Self::Device)
    where
        Iter: Iterator<Item = &'a mut TensorData>,
    {
        B::staging(data, device);
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }

    fn device_count(type_id: u16) -> usize {
        B::device_count(type_id)
    }
}
