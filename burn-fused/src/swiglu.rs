//! The gate of a feed-forward network, differentiated from its two operands.

use burn::tensor::activation;
use burn::tensor::{DType, Tensor, TensorPrimitive};
use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, TensorMetadata};
use burn_decorator::autodiff::{TapeBackend, record};
use burn_decorator::fused;

use crate::precision::{cast, is_half, raise};

/// `silu(gate) * up`, where `silu(x)` is `x sigmoid(x)` (SwiGLU: Shazeer, arXiv 2002.05202).
///
/// On a backend with [`FusedBackward`](crate::FusedBackward) it is one operation, and autodiff keeps
/// `gate` and `up`; elsewhere it is composed, and autodiff keeps `sigmoid(gate)` and `silu(gate)`
/// too. In 16 bits it is computed in f32, and rounded once. Under `burn_amp::Autocast` it has the
/// type of its operands, which linear layers give in the low one.
///
/// # Shapes
///
/// - gate, up, output: the same, in one type
///
/// # Panics
///
/// If shapes or types differ.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{Distribution, Tensor, activation::silu};
/// use burn_flex::Flex;
/// use burn_fused::{FusedBackward, swiglu};
///
/// type B = FusedBackward<Autodiff<Flex>>;
/// let [gate, up] = [(); 2].map(|()| Tensor::<B, 2>::random([4, 8], Distribution::Default, &Default::default()));
///
/// let y = swiglu(gate.clone(), up.clone()); // was: silu(gate) * up
/// y.into_data().assert_approx_eq::<f32>(&(silu(gate) * up).into_data(), Default::default());
/// ```
pub fn swiglu<B: Backend, const D: usize>(gate: Tensor<B, D>, up: Tensor<B, D>) -> Tensor<B, D> {
    let (shape, of_up) = (gate.dims(), up.dims());
    assert_eq!(
        shape, of_up,
        "the gate is {shape:?}, and what it closes {of_up:?}"
    );
    let (dtype, of_up) = (gate.dtype(), up.dtype());
    assert_eq!(
        dtype, of_up,
        "the gate is {dtype:?}, and what it closes {of_up:?}"
    );
    let device = gate.device();
    if fused::has_fused_backward(|| B::ad_enabled(&device)) {
        let [lhs, rhs] = [gate.clone(), up.clone()].map(|x| x.into_primitive().tensor());
        if let Some(result) = fused::compute(fused::SwiGlu, || B::float_atan2(lhs, rhs)) {
            return Tensor::from_primitive(TensorPrimitive::Float(result));
        }
    }
    if is_half(dtype) {
        let [gate, up] = [gate, up].map(|x| x.cast(DType::F32));
        return (activation::silu(gate) * up).cast(dtype);
    }
    activation::silu(gate) * up
}

/// `x sigmoid(x)` (Swish): what [`silu`](burn::tensor::activation::silu) computes.
///
/// On a backend with [`FusedBackward`](crate::FusedBackward) autodiff keeps `x`; Burn's composition
/// keeps `sigmoid(x)` too. It is [`swiglu`] with ones for `up`, which take no memory.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{Distribution, Tensor, activation};
/// use burn_flex::Flex;
/// use burn_fused::{FusedBackward, silu};
///
/// type B = FusedBackward<Autodiff<Flex>>;
/// let x = Tensor::<B, 2>::random([4, 8], Distribution::Default, &Default::default());
///
/// let y = silu(x.clone()); // was: activation::silu(x)
/// y.into_data().assert_approx_eq::<f32>(&activation::silu(x).into_data(), Default::default());
/// ```
pub fn silu<B: Backend, const D: usize>(x: Tensor<B, D>) -> Tensor<B, D> {
    let one = Tensor::<B, D>::ones([1; D], (&x.device(), x.dtype()));
    let ones = one.expand(x.shape());
    swiglu(x, ones)
}

/// In place of the operation that carries it.
pub(crate) fn recorded<A: TapeBackend>(gate: FloatTensor<A>, up: FloatTensor<A>) -> FloatTensor<A> {
    let state = State::<A::InnerBackend> {
        gate: gate.primitive.clone(),
        up: up.primitive.clone(),
    };
    let result = state.result();
    record(SwiGlu, [&gate, &up], state, result)
}

#[derive(Clone, Debug)]
struct State<B: Backend> {
    gate: FloatTensor<B>,
    up: FloatTensor<B>,
}

impl<B: Backend> State<B> {
    fn result(&self) -> FloatTensor<B> {
        let gate = raise::<B>(self.gate.clone());
        let silu = B::float_mul(gate.clone(), B::sigmoid(gate));
        let product = B::float_mul(silu, raise::<B>(self.up.clone()));
        cast::<B>(product, self.gate.dtype())
    }
}

#[derive(Debug)]
struct SwiGlu;

impl<B: Backend> Backward<B, 2> for SwiGlu {
    type State = State<B>;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let State { gate, up } = ops.state;
        let dtype = gate.dtype();
        let gradient = raise::<B>(gradients.consume::<B>(&ops.node));
        let [of_gate, of_up] = ops.parents;
        let gate = raise::<B>(gate);
        let sigmoid = B::sigmoid(gate.clone());
        let silu = B::float_mul(gate, sigmoid.clone());
        if let Some(node) = of_up {
            let of_up = B::float_mul(gradient.clone(), silu.clone());
            gradients.register::<B>(node.id, cast::<B>(of_up, dtype));
        }
        if let Some(node) = of_gate {
            // The derivative of silu is sigmoid + silu (1 - sigmoid).
            let rest = B::float_sub(silu.clone(), B::float_mul(silu, sigmoid.clone()));
            let slope = B::float_add(sigmoid, rest);
            let of_silu = B::float_mul(gradient, raise::<B>(up));
            let of_gate = B::float_mul(of_silu, slope);
            gradients.register::<B>(node.id, cast::<B>(of_gate, dtype));
        }
    }
}
