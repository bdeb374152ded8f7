//! Layer norm, differentiated from its operand.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::ops::ModuleOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};

use burn_decorator::autodiff::{TapeBackend, record};
use burn_decorator::fused;

use crate::precision::{cast, raise};
use crate::rms_norm;
use crate::rows::{Normalized, as_row, normalize, sum_of_rows};

/// `(tensor - mean) / sqrt(variance + epsilon) * gamma + beta` over the last dimension, or the norm
/// that the call carries.
pub(super) fn layer_norm<A: TapeBackend>(
    tensor: FloatTensor<A>,
    gamma: FloatTensor<A>,
    beta: Option<FloatTensor<A>>,
    epsilon: f64,
) -> FloatTensor<A> {
    if beta.is_none() && fused::is_asked_for::<fused::RmsNorm>() {
        return rms_norm::recorded::<A>(tensor, gamma, epsilon);
    }
    let (x, scale) = (tensor.primitive.clone(), gamma.primitive.clone());
    let shift = beta.as_ref().map(|beta| beta.primitive.clone());
    let result = A::InnerBackend::layer_norm(x.clone(), scale.clone(), shift, epsilon);
    let state = (x, scale, epsilon);
    match &beta {
        Some(beta) => record(LayerNorm, [&tensor, &gamma, beta], state, result),
        None => record(LayerNorm, [&tensor, &gamma], state, result),
    }
}

#[derive(Debug)]
struct LayerNorm;

/// With three operands, or two without beta.
impl<B: Backend, const N: usize> Backward<B, N> for LayerNorm {
    type State = (FloatTensor<B>, FloatTensor<B>, f64);

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let (x, gamma, epsilon) = ops.state;
        let gradient = gradients.consume::<B>(&ops.node);
        let (dtype, last) = (x.dtype(), x.rank() - 1);
        let gradient = raise::<B>(gradient);
        let mut parents = ops.parents.into_iter();
        let [of_x, of_gamma, of_beta] = std::array::from_fn(|_| parents.next().flatten());
        if let Some(beta) = of_beta {
            let sum = sum_of_rows::<B>(gradient.clone());
            gradients.register::<B>(beta.id, cast::<B>(sum, dtype));
        }
        if of_x.is_none() && of_gamma.is_none() {
            return;
        }
        let x = raise::<B>(x);
        let mean = B::float_mean_dim(x.clone(), last);
        let centered = B::float_sub(x, mean);
        let Normalized {
            normalized,
            inverse,
        } = normalize::<B>(centered, epsilon);
        let product = B::float_mul(gradient.clone(), normalized.clone());
        if let Some(gamma) = of_gamma {
            let sum = sum_of_rows::<B>(product.clone());
            gradients.register::<B>(gamma.id, cast::<B>(sum, dtype));
        }
        if let Some(x) = of_x {
            let gamma = as_row::<B>(raise::<B>(gamma), last + 1);
            let slope = B::float_mean_dim(B::float_mul(product, gamma.clone()), last);
            let scaled = B::float_mul(gradient, gamma);
            let shift = B::float_mean_dim(scaled.clone(), last);
            let along = B::float_mul(normalized, slope);
            let rest = B::float_sub(B::float_sub(scaled, shift), along);
            let of_x = B::float_mul(rest, inverse);
            gradients.register::<B>(x.id, cast::<B>(of_x, dtype));
        }
    }
}
