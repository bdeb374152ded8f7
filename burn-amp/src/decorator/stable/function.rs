//! Functions of one tensor whose slope is infinite, or not a number, at an end of the range.

use std::f64::consts::{FRAC_2_SQRT_PI, LN_2};

use burn_backend::{Backend, DType, Scalar, TensorMetadata, tensor::FloatTensor};

use super::accurate;
use super::activation::softplus;
use super::low::{Derivative, constant, is_composed, rounded};
use super::native::{ACOSH, ASINH, ATANH, ERF, Points, RECIPROCAL_ROOT, TANH};
use super::slope::{above, finite, function, is_zero};
use super::{Call, Tensor, is_differentiated};
use crate::decorator::ops::Row;
use crate::decorator::origin::Origin;
use crate::policy::Policy;

/// From here on `x^2 + 1` is `x^2` in f32, and the inverse hyperbolic functions are logarithms.
const LARGE: f64 = 1e9;

/// A finite slope, so that an infinite result that a mask replaces has no gradient (`elu`).
pub(in crate::decorator) fn float_exp<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !call.raises::<B>(&x) {
        return call.wrap::<B>(B::float_exp(x.brought::<B>(call.target)));
    }
    let exponent = x.raised::<B>();
    let result = function::<B>(exponent.clone(), B::float_exp, |_, value| {
        finite::<B>(value)
    });
    call.wrap::<B>(result).with_origin(Origin::Exp { exponent })
}

/// `e^x - 1`, also where `e^x` rounds to 1.
pub(super) fn exp_minus_one<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let value = |x: FloatTensor<B>| {
        // Horner's scheme of x + x^2 / 2! + .. + x^5 / 5!
        let mut series =
            B::float_add_scalar(B::float_mul_scalar(x.clone(), 0.2.into()), 1.0.into());
        for order in [4.0, 3.0, 2.0] {
            let term = B::float_mul_scalar(B::float_mul(x.clone(), series), (1.0 / order).into());
            series = B::float_add_scalar(term, 1.0.into());
        }
        let series = B::float_mul(x.clone(), series);
        let is_far = above::<B>(&B::float_abs(x.clone()), 0.1);
        let difference = B::float_sub_scalar(B::float_exp(x), 1.0.into());
        B::float_mask_where(series, is_far, difference)
    };
    function::<B>(x, value, |x, _| finite::<B>(B::float_exp(x)))
}

/// A finite slope: that of `log(0)` is infinite, and would make NaN of a gradient of zero (binary
/// cross entropy).
pub(in crate::decorator) fn float_log<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if let Some(Origin::ExpPlusOne { exponent }) = x.origin.as_deref() {
        return call.wrap::<B>(softplus::<B>(exponent.clone()));
    }
    if !call.raises::<B>(&x) {
        return call.wrap::<B>(B::float_log(x.brought::<B>(call.target)));
    }
    let slope = |x, _| finite::<B>(B::float_recip(x));
    call.wrap::<B>(function::<B>(x.raised::<B>(), B::float_log, slope))
}

/// As [`float_log`].
pub(in crate::decorator) fn float_log1p<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if let Some(Origin::Exp { exponent }) = x.origin.as_deref() {
        return call.wrap::<B>(softplus::<B>(exponent.clone()));
    }
    if !call.raises::<B>(&x) {
        return call.wrap::<B>(B::float_log1p(x.brought::<B>(call.target)));
    }
    let slope = |x, _| finite::<B>(B::float_recip(B::float_add_scalar(x, 1.0.into())));
    call.wrap::<B>(function::<B>(x.raised::<B>(), accurate::log1p::<B>, slope))
}

/// With the slope 0 at 0, as PyTorch's norms have it: an infinite one makes NaN of the gradient of
/// the squares under the root. In f32, and in a low type where the backend's gradient loses digits.
pub(in crate::decorator) fn float_sqrt<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !call.mends || !is_differentiated::<B>(&x.tensor) {
        return call.wrap::<B>(B::float_sqrt(x.brought::<B>(call.target)));
    }
    let slope = |root: FloatTensor<B>| {
        let at_zero = is_zero::<B>(&root);
        let slope = B::float_mul_scalar(B::float_recip(root), 0.5.into());
        B::float_mask_fill(slope, at_zero, 0.0.into())
    };
    if !call.is_low {
        let x = x.brought::<B>(call.target);
        return call.wrap::<B>(function::<B>(x, B::float_sqrt, |_, root| slope(root)));
    }
    // Burn's gradient.
    let reciprocal = |x| B::float_powf_scalar(x, (-0.5).into());
    if !is_composed::<B>(&call, row, &x, reciprocal, RECIPROCAL_ROOT) {
        return call.wrap::<B>(B::float_sqrt(x.brought::<B>(call.target)));
    }
    let root = B::float_sqrt(constant::<B>(&x));
    rounded::<B>(&call, x, root.clone(), Derivative::Bounded, || slope(root))
}

/// `1 - tanh^2` is the slope. An f32 operand, as in `mish`, has no better kernel.
pub(in crate::decorator) fn float_tanh<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let slope = |value: FloatTensor<B>| {
        let square = B::float_mul(value.clone(), value);
        B::float_add_scalar(B::float_neg(square), 1.0.into())
    };
    if is_composed::<B>(&call, row, &x, B::float_tanh, TANH) {
        let value = accurate::tanh::<B>(constant::<B>(&x));
        let derivative = Derivative::Vanishing;
        return rounded::<B>(&call, x, value.clone(), derivative, || slope(value));
    }
    let x = x.brought::<B>(call.target);
    if !call.mends || call.is_low || accurate::has_tanh::<B>(&x) {
        return call.wrap::<B>(B::float_tanh(x));
    }
    let result = function::<B>(x, accurate::tanh::<B>, |_, value| slope(value));
    call.wrap::<B>(result)
}

/// `2 / sqrt(pi) e^(-x^2)` is the slope.
pub(in crate::decorator) fn float_erf<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !is_composed::<B>(&call, row, &x, B::float_erf, ERF) {
        return call.wrap::<B>(B::float_erf(x.brought::<B>(call.target)));
    }
    let constant = constant::<B>(&x);
    let value = accurate::erf::<B>(constant.clone());
    rounded::<B>(&call, x, value, Derivative::Vanishing, || {
        let square = B::float_mul(constant.clone(), constant);
        let exp = B::float_exp(B::float_neg(square));
        B::float_mul_scalar(exp, FRAC_2_SQRT_PI.into())
    })
}

/// `1 / (1 - x^2)` is the slope.
pub(in crate::decorator) fn float_atanh<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !is_composed::<B>(&call, row, &x, B::float_atanh, ATANH) {
        return call.wrap::<B>(B::float_atanh(x.brought::<B>(call.target)));
    }
    let constant = constant::<B>(&x);
    let value = B::float_atanh(constant.clone());
    rounded::<B>(&call, x, value, Derivative::Infinite, || {
        let square = B::float_mul(constant.clone(), constant);
        let rest = B::float_add_scalar(B::float_neg(square), 1.0.into());
        finite::<B>(B::float_recip(rest))
    })
}

/// As [`float_sqrt`] for exponents between 0 and 1.
pub(in crate::decorator) fn float_powf_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    exponent: Scalar,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let x = x.brought::<B>(call.target);
    let power: f64 = exponent.elem();
    if call.mends && power == -2.0 {
        return call.wrap::<B>(squared_reciprocal::<B>(x));
    }
    let is_root = call.mends && !call.is_low && power.fract() != 0.0;
    if !is_root || !is_differentiated::<B>(&x) {
        return call.wrap::<B>(B::float_powf_scalar(x, exponent));
    }
    let slope = |x: FloatTensor<B>, _| {
        let at_zero = is_zero::<B>(&x);
        let lower = B::float_powf_scalar(x, (power - 1.0).into());
        let slope = finite::<B>(B::float_mul_scalar(lower, power.into()));
        if (0.0..1.0).contains(&power) {
            B::float_mask_fill(slope, at_zero, 0.0.into())
        } else {
            slope
        }
    };
    let value = |x| B::float_powf_scalar(x, exponent);
    call.wrap::<B>(function::<B>(x, value, slope))
}

/// As [`squared_reciprocal`] for -2.
pub(in crate::decorator) fn float_powi_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    exponent: Scalar,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let x = x.brought::<B>(call.target);
    if !call.mends || exponent.elem::<i64>() != -2 {
        return call.wrap::<B>(B::float_powi_scalar(x, exponent));
    }
    call.wrap::<B>(squared_reciprocal::<B>(x))
}

/// The square of the reciprocal: Burn takes the reciprocal of the square, whose gradient has the
/// fourth power.
fn squared_reciprocal<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let reciprocal = B::float_recip(x);
    B::float_mul(reciprocal.clone(), reciprocal)
}

/// Whether an inverse hyperbolic function is composed: in bf16 everywhere, which has f32's range,
/// so that `x^2` is infinite above 1.8e19.
fn is_inverse_composed<B: Backend>(
    call: &Call,
    row: Row,
    x: &Tensor<B>,
    kernel: fn(FloatTensor<B>) -> FloatTensor<B>,
    points: Points,
) -> bool {
    let has_large_squares = call.mends && call.is_low && x.tensor.dtype() == DType::BF16;
    has_large_squares || is_composed::<B>(call, row, x, kernel, points)
}

/// `sign(x) log(2 |x|)` where `x^2` may be infinite.
pub(in crate::decorator) fn float_asinh<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !is_inverse_composed::<B>(&call, row, &x, B::float_asinh, ASINH) {
        return call.wrap::<B>(B::float_asinh(x.brought::<B>(call.target)));
    }
    let constant = constant::<B>(&x);
    let sign = B::float_sign(constant.clone());
    let logarithm = B::float_mul(sign, log_of_twice::<B>(constant.clone()));
    let near = accurate::asinh::<B>(within_large::<B>(constant.clone()));
    let is_large = above::<B>(&B::float_abs(constant.clone()), LARGE);
    let value = B::float_mask_where(near, is_large, logarithm);
    rounded::<B>(&call, x, value, Derivative::Bounded, || {
        slope_of_root::<B>(constant, 1.0)
    })
}

/// `log(2 x)` where `x^2` may be infinite.
pub(in crate::decorator) fn float_acosh<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !is_inverse_composed::<B>(&call, row, &x, B::float_acosh, ACOSH) {
        return call.wrap::<B>(B::float_acosh(x.brought::<B>(call.target)));
    }
    let constant = constant::<B>(&x);
    let near = B::float_acosh(within_large::<B>(constant.clone()));
    let is_large = above::<B>(&constant, LARGE);
    let value = B::float_mask_where(near, is_large, log_of_twice::<B>(constant.clone()));
    rounded::<B>(&call, x, value, Derivative::Infinite, || {
        slope_of_root::<B>(constant, -1.0)
    })
}

fn within_large<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_clamp(x, (-LARGE).into(), LARGE.into())
}

fn log_of_twice<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    B::float_add_scalar(B::float_log(B::float_abs(x)), LN_2.into())
}

/// `1 / sqrt(x^2 + offset)`.
fn slope_of_root<B: Backend>(x: FloatTensor<B>, offset: f64) -> FloatTensor<B> {
    let magnitude = B::float_abs(x);
    let is_large = above::<B>(&magnitude, LARGE);
    let near = within_large::<B>(magnitude.clone());
    let square = B::float_add_scalar(B::float_mul(near.clone(), near), offset.into());
    let slope = B::float_recip(B::float_sqrt(square));
    finite::<B>(B::float_mask_where(
        slope,
        is_large,
        B::float_recip(magnitude),
    ))
}
