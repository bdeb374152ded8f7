//! Softmax and its logarithm, differentiated from their results.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, unary};
use burn_backend::Backend;
use burn_backend::ops::ActivationOps;
use burn_backend::tensor::FloatTensor;

use burn_decorator::autodiff::{TapeBackend, record};

pub(super) fn softmax<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    let result = A::InnerBackend::softmax(tensor.primitive.clone(), dim);
    let operation = FromResult(softmax_backward::<A::InnerBackend>);
    record(operation, [&tensor], (result.clone(), dim), result)
}

pub(super) fn softmin<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    softmax::<A>(A::float_neg(tensor), dim)
}

pub(super) fn log_softmax<A: TapeBackend>(tensor: FloatTensor<A>, dim: usize) -> FloatTensor<A> {
    let result = A::InnerBackend::log_softmax(tensor.primitive.clone(), dim);
    let operation = FromResult(log_softmax_backward::<A::InnerBackend>);
    record(operation, [&tensor], (result.clone(), dim), result)
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

/// An operation along a dimension, with the function of its result, the result's gradient and the
/// dimension that is the operand's gradient.
#[derive(Debug)]
struct FromResult<T>(fn(T, T, usize) -> T);

impl<B: Backend> Backward<B, 1> for FromResult<FloatTensor<B>> {
    type State = (FloatTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (result, dim) = ops.state;
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            self.0(result, gradient, dim)
        });
    }
}
