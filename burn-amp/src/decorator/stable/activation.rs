//! GELU, sigmoid and its logarithm.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use burn_backend::{Backend, tensor::FloatTensor};

use super::accurate;
use super::low::{Derivative, constant, is_composed, rounded};
use super::native::GELU;
use super::number::remembering;
use super::slope::function;
use super::{Call, Tensor};
use crate::decorator::ops::Row;
use crate::policy::Policy;

/// `x` times the cumulative normal distribution.
///
/// Burn's default gradient has `x^3`, which is infinite in f16 above 41, and its value is composed
/// in the low type. A backend without a GELU of its own gets both in f32 here; the derivative, at
/// most 1.13, is kept in the low type in place of `x`.
pub(in crate::decorator) fn gelu<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !is_composed::<B>(&call, row, &x, B::gelu, GELU) {
        return call.wrap::<B>(B::gelu(x.brought::<B>(call.target)));
    }
    let constant = constant::<B>(&x);
    let below = cumulative::<B>(constant.clone());
    let value = B::float_mul(constant.clone(), below.clone());
    // NaN where `x` is infinite, as PyTorch's gradient.
    rounded::<B>(&call, x, value, Derivative::Bounded, || {
        let above = B::float_mul(constant.clone(), density::<B>(constant));
        B::float_add(below, above)
    })
}

/// The cumulative normal distribution.
fn cumulative<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let erf = B::float_erf(B::float_mul_scalar(x, FRAC_1_SQRT_2.into()));
    B::float_mul_scalar(B::float_add_scalar(erf, 1.0.into()), 0.5.into())
}

/// The density of the normal distribution; 0 where `x^2` is infinite.
fn density<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let square = B::float_mul(x.clone(), x);
    let exp = B::float_exp(B::float_mul_scalar(square, (-0.5).into()));
    B::float_mul_scalar(exp, (1.0 / (2.0 * PI).sqrt()).into())
}

/// In the type of its operand, and in f32 where a logarithm takes it: a probability of 0.9999 is 1
/// in a low type, and the logarithm of the rest infinite.
pub(in crate::decorator) fn sigmoid<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let result = B::sigmoid(x.clone().brought::<B>(call.target));
    if !call.mends || !call.is_low {
        return call.wrap::<B>(result);
    }
    remembering::<B>(call, x, result, B::sigmoid)
}

/// `min(x, 0) - log(1 + e^-|x|)`, with the slope `sigmoid(-x)`: Burn computes it as 1 minus a
/// number that rounds to 1.
pub(in crate::decorator) fn log_sigmoid<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !call.raises::<B>(&x) {
        return call.wrap::<B>(B::log_sigmoid(x.brought::<B>(call.target)));
    }
    let result = function::<B>(
        x.raised::<B>(),
        |x| B::float_neg(softplus_value::<B>(B::float_neg(x))),
        |x, _| B::sigmoid(B::float_neg(x)),
    );
    call.wrap::<B>(result)
}

/// `log(1 + e^x)`, also where `e^x` is infinite or lost beside 1.
pub(super) fn softplus<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    function::<B>(x, softplus_value::<B>, |x, _| B::sigmoid(x))
}

fn softplus_value<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let rest = B::float_exp(B::float_neg(B::float_abs(x.clone())));
    B::float_add(
        B::float_clamp_min(x, 0.0.into()),
        accurate::log1p::<B>(rest),
    )
}
