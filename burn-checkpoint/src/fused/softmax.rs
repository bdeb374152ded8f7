//! Softmax and its logarithm, differentiated from their results.

use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::{AutodiffTensor, record};

pub(super) fn softmax<B: Backend>(tensor: AutodiffTensor<B>, dim: usize) -> AutodiffTensor<B> {
    let result = B::softmax(tensor.primitive.clone(), dim);
    record(Softmax, [&tensor], (result.clone(), dim), result)
}

pub(super) fn log_softmax<B: Backend>(tensor: AutodiffTensor<B>, dim: usize) -> AutodiffTensor<B> {
    let result = B::log_softmax(tensor.primitive.clone(), dim);
    record(LogSoftmax, [&tensor], (result.clone(), dim), result)
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

#[derive(Debug)]
struct Softmax;

impl<B: Backend> Backward<B, 1> for Softmax {
    type State = (FloatTensor<B>, usize);

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (softmax, dim) = ops.state;
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            softmax_backward::<B>(softmax, gradient, dim)
        });
    }
}

#[derive(Debug)]
struct LogSoftmax;

impl<B: Backend> Backward<B, 1> for LogSoftmax {
    type State = (FloatTensor<B>, usize);

    /// `g - exp(y) sum(g)`
    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (log_softmax, dim) = ops.state;
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            let sum = B::float_sum_dim(gradient.clone(), dim);
            B::float_sub(gradient, B::float_mul(B::float_exp(log_softmax), sum))
        });
    }
}
