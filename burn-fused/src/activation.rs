//! ReLU and the sigmoid, differentiated from their results.
//!
//! A linear layer after them keeps the result too, for the gradient of its weight, so one tensor is
//! kept where Burn's `Autodiff` keeps operand and result.

use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_decorator::autodiff::TapeBackend;

use crate::from_result::record_from_result;

pub(super) fn relu<A: TapeBackend>(tensor: FloatTensor<A>) -> FloatTensor<A> {
    record_from_result::<A::InnerBackend>(
        tensor,
        A::InnerBackend::relu,
        A::InnerBackend::relu_backward,
    )
}

pub(super) fn sigmoid<A: TapeBackend>(tensor: FloatTensor<A>) -> FloatTensor<A> {
    record_from_result::<A::InnerBackend>(
        tensor,
        A::InnerBackend::sigmoid,
        A::InnerBackend::sigmoid_backward,
    )
}
