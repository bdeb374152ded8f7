//! Root mean square norm, differentiated from its operand.

use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_decorator::autodiff::{TapeBackend, record};
use burn_decorator::fused;

use crate::precision::{cast, is_half, raise};
use crate::rows::{Normalized, as_row, normalize, sum_of_rows};

/// `x / sqrt(mean(x²) + epsilon) * gamma` over the last dimension (Zhang and Sennrich,
/// arXiv 1910.07467): what [`RmsNorm`](burn::nn::RmsNorm) computes.
///
/// On a backend with [`FusedBackward`](crate::FusedBackward) it is one operation, and autodiff keeps
/// `x`; elsewhere it is composed, and autodiff keeps two tensors of that size. Operands of 16 bits
/// are computed with in f32. The result has the type of `x`; under `burn_amp::Autocast` over
/// `FusedBackward` it is f32, as that of layer norm.
///
/// # Shapes
///
/// - x, output: `[.., features]`
/// - gamma: `[features]`
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::nn::RmsNormConfig;
/// use burn::tensor::{Distribution, Tensor};
/// use burn_flex::Flex;
/// use burn_fused::{FusedBackward, rms_norm};
///
/// type B = FusedBackward<Autodiff<Flex>>;
/// let device = Default::default();
/// let norm = RmsNormConfig::new(8).init::<B>(&device);
/// let x = Tensor::<B, 2>::random([4, 8], Distribution::Default, &device);
///
/// let y = rms_norm(x.clone(), norm.gamma.val(), norm.epsilon); // was: norm.forward(x)
/// (y - norm.forward(x)).into_data().assert_approx_eq::<f32>(
///     &burn::tensor::TensorData::zeros::<f32, _>([4, 8]),
///     Default::default(),
/// );
/// ```
pub fn rms_norm<B: Backend, const D: usize>(
    x: Tensor<B, D>,
    gamma: Tensor<B, 1>,
    epsilon: f64,
) -> Tensor<B, D> {
    let device = x.device();
    if fused::has_fused_backward(|| B::ad_enabled(&device)) {
        let operand = x.clone().into_primitive().tensor();
        let scale = gamma.clone().into_primitive().tensor();
        let norm = || B::layer_norm(operand, scale, None, epsilon);
        if let Some(result) = fused::compute(fused::RmsNorm, norm) {
            return Tensor::from_primitive(TensorPrimitive::Float(result));
        }
    }
    let dtype = x.dtype();
    let wide = if is_half(dtype) {
        x.cast(DType::F32)
    } else {
        x
    };
    let gamma = gamma.cast(wide.dtype()).unsqueeze();
    let deviation = (wide.clone().square().mean_dim(D - 1) + epsilon).sqrt();
    (wide / deviation * gamma).cast(dtype)
}

/// In place of the layer norm that carries it.
pub(crate) fn recorded<A: TapeBackend>(
    tensor: FloatTensor<A>,
    gamma: FloatTensor<A>,
    epsilon: f64,
) -> FloatTensor<A> {
    let state = State::<A::InnerBackend> {
        x: tensor.primitive.clone(),
        gamma: gamma.primitive.clone(),
        epsilon,
    };
    let result = state.result();
    record(RmsNorm, [&tensor, &gamma], state, result)
}

#[derive(Clone, Debug)]
struct State<B: Backend> {
    /// `[.., features]`
    x: FloatTensor<B>,
    /// `[features]`
    gamma: FloatTensor<B>,
    epsilon: f64,
}

impl<B: Backend> State<B> {
    fn result(&self) -> FloatTensor<B> {
        let normalized = self.normalize().normalized;
        let gamma = self.gamma_in(normalized.dtype());
        cast::<B>(B::float_mul(normalized, gamma), self.x.dtype())
    }

    /// In at least f32.
    fn normalize(&self) -> Normalized<B> {
        normalize::<B>(raise::<B>(self.x.clone()), self.epsilon)
    }

    /// `[1, .., features]`, in this type
    fn gamma_in(&self, dtype: DType) -> FloatTensor<B> {
        as_row::<B>(cast::<B>(self.gamma.clone(), dtype), self.x.rank())
    }
}

#[derive(Debug)]
struct RmsNorm;

impl<B: Backend> Backward<B, 2> for RmsNorm {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let state = ops.state;
        let gradient = raise::<B>(gradients.consume::<B>(&ops.node));
        let [of_x, of_gamma] = ops.parents;
        let Normalized {
            normalized,
            inverse,
        } = state.normalize();
        if let Some(gamma) = of_gamma {
            let product = B::float_mul(gradient.clone(), normalized.clone());
            let sum = cast::<B>(sum_of_rows::<B>(product), state.gamma.dtype());
            gradients.register::<B>(gamma.id, sum);
        }
        if let Some(x) = of_x {
            let scaled = B::float_mul(gradient, state.gamma_in(normalized.dtype()));
            let product = B::float_mul(scaled.clone(), normalized.clone());
            let slope = B::float_mean_dim(product, state.x.rank() - 1);
            let rest = B::float_sub(scaled, B::float_mul(normalized, slope));
            let of_x = cast::<B>(B::float_mul(rest, inverse), state.x.dtype());
            gradients.register::<B>(x.id, of_x);
        }
    }
}
