//! `Autocast` as a backend.

use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes};

use super::tensor::AutocastTensor;
use crate::policy::{Bf16, Policy};

/// A backend that picks the precision of every operation by itself: `Autocast<Autodiff<Cuda>>`.
///
/// Parameters, gradients and optimizer state stay f32; each operation runs in the class that
/// [`op_table`](crate::op_table) gives it under policy `P`. Put it outside of `Autodiff`: the casts
/// are then part of the graph, saved activations are in the low type, and backward operations run
/// in the type of their forward. This is PyTorch's order and reason.
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
    burn_decorator::forward_types!(B, float tensor: AutocastTensor<B::FloatTensorPrimitive>);
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend, P: Policy> Backend for Autocast<B, P> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("autocast<{}, {}>", B::name(device), P::name())
    }
}
