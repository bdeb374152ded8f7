//! Functions in f32 that keep their digits near zero.
//!
//! Where a compiler for GPUs makes `log(1 + x)` of a logarithm, or a hyperbolic function of two
//! exponentials, a difference of numbers near 1 remains of a small operand. There the function is
//! the first terms of its series.

use std::f64::consts::FRAC_2_SQRT_PI;

use burn_backend::{Backend, TensorMetadata, tensor::FloatTensor};

use super::native::{ASINH, ERF, LOG1P, Points, TANH, is_exact};
use super::slope::above;

/// Up to this magnitude three terms have f32's digits; beyond it a difference of numbers near 1 has
/// four digits at least.
const SMALL: f64 = 1.0 / 128.0;

/// The backend's kernel, and near zero `series` if the kernel loses digits.
fn joined<B: Backend>(
    operation: &'static str,
    x: FloatTensor<B>,
    kernel: fn(FloatTensor<B>) -> FloatTensor<B>,
    points: Points,
    series: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    let device = B::float_device(&x);
    if is_exact::<B>(operation, &device, x.dtype(), kernel, points) {
        return kernel(x);
    }
    let is_far = above::<B>(&B::float_abs(x.clone()), SMALL);
    B::float_mask_where(series(x.clone()), is_far, kernel(x))
}

/// `linear x + cubic x^3`.
fn odd<B: Backend>(linear: f64, cubic: f64) -> impl FnOnce(FloatTensor<B>) -> FloatTensor<B> {
    move |x| {
        let square = B::float_mul(x.clone(), x.clone());
        let factor = B::float_mul_scalar(square, cubic.into());
        B::float_mul(x, B::float_add_scalar(factor, linear.into()))
    }
}

/// Whether the kernel of an f32 tanh keeps its digits.
pub(super) fn has_tanh<B: Backend>(x: &FloatTensor<B>) -> bool {
    let device = B::float_device(x);
    is_exact::<B>("float_tanh", &device, x.dtype(), B::float_tanh, TANH)
}

pub(super) fn tanh<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let series = odd::<B>(1.0, -1.0 / 3.0);
    joined::<B>("float_tanh", x, B::float_tanh, TANH, series)
}

pub(super) fn erf<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let series = odd::<B>(FRAC_2_SQRT_PI, -FRAC_2_SQRT_PI / 3.0);
    joined::<B>("float_erf", x, B::float_erf, ERF, series)
}

pub(super) fn asinh<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let series = odd::<B>(1.0, -1.0 / 6.0);
    joined::<B>("float_asinh", x, B::float_asinh, ASINH, series)
}

pub(super) fn log1p<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    // x - x^2 / 2 + x^3 / 3
    let series = |x: FloatTensor<B>| {
        let third = B::float_mul_scalar(x.clone(), (1.0 / 3.0).into());
        let slope = B::float_mul(x.clone(), B::float_sub_scalar(third, 0.5.into()));
        B::float_mul(x, B::float_add_scalar(slope, 1.0.into()))
    };
    joined::<B>("float_log1p", x, B::float_log1p, LOG1P, series)
}
