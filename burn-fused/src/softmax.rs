//! Softmax and its logarithm, differentiated from their results.

use burn_backend::Backend;
use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;
use burn_decorator::autodiff::TapeBackend;

use crate::from_result::record_from_result;

pub(super) fn softmax<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    record_from_result::<A::InnerBackend>(
        tensor,
        |operand| A::InnerBackend::softmax(operand, dim),
        move |softmax, gradient| softmax_backward::<A::InnerBackend>(softmax, gradient, dim),
    )
}

pub(super) fn softmin<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    softmax::<A>(A::float_neg(tensor), dim)
}

pub(super) fn log_softmax<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    record_from_result::<A::InnerBackend>(
        tensor,
        |operand| A::InnerBackend::log_softmax(operand, dim),
        move |result, gradient| log_softmax_backward::<A::InnerBackend>(result, gradient, dim),
    )
}

/// The gradient of the operand of a softmax, from the softmax and its gradient: `y (g - sum(y g))`.
pub(super) fn softmax_backward<B: Backend>(
    softmax: FloatTensor<B>,
    gradient: FloatTensor<B>,
    dim: usize,
) -> FloatTensor<B> {
    let product = B::float_mul(gradient, softmax.clone());
    let sum = B::float_sum_dim(product.clone(), dim);
    B::float_sub(product, B::float_mul(softmax, sum))
}

/// As [`softmax_backward`], of a log softmax: `g - exp(y) sum(g)`.
fn log_softmax_backward<B: Backend>(
    log_softmax: FloatTensor<B>,
    gradient: FloatTensor<B>,
    dim: usize,
) -> FloatTensor<B> {
    let sum = B::float_sum_dim(gradient.clone(), dim);
    B::float_sub(gradient, B::float_mul(B::float_exp(log_softmax), sum))
}
