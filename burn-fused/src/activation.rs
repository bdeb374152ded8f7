//! Activation functions that keep one tensor where Burn's `Autodiff` keeps two: operand and result.
//!
//! What follows an activation is a linear layer as a rule, which keeps the result for the gradient
//! of its weight. The gradients of ReLU and of the sigmoid follow from that result as well. GELU's
//! does not, so its operand is kept, and the result is computed again when the linear layer's
//! backward asks for it.

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
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

/// Burn's own, whatever strategy `A` has: under this one the tape computes the result again from the
/// operand, once however many operations ask for it.
pub(super) fn gelu<A: TapeBackend>(tensor: FloatTensor<A>) -> FloatTensor<A> {
    Autodiff::<A::InnerBackend, BalancedCheckpointing>::gelu(tensor)
}
