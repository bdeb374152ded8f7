//! A function with its value and its derivative computed apart.

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, BoolDType, get_device_settings};

pub(super) const MOST: f64 = f32::MAX as f64;

/// The type of masks on the tensor's device.
pub(super) fn bool_dtype<B: Backend>(tensor: &FloatTensor<B>) -> BoolDType {
    get_device_settings::<B>(&B::float_device(tensor)).bool_dtype
}

/// Where the tensor is greater than a number.
pub(super) fn above<B: Backend>(tensor: &FloatTensor<B>, number: f64) -> BoolTensor<B> {
    B::float_greater_elem(tensor.clone(), number.into(), bool_dtype::<B>(tensor))
}

/// Where the tensor is lower than a number.
pub(super) fn below<B: Backend>(tensor: &FloatTensor<B>, number: f64) -> BoolTensor<B> {
    B::float_lower_elem(tensor.clone(), number.into(), bool_dtype::<B>(tensor))
}

/// Where the tensor is zero.
pub(super) fn is_zero<B: Backend>(tensor: &FloatTensor<B>) -> BoolTensor<B> {
    B::float_equal_elem(tensor.clone(), 0.0.into(), bool_dtype::<B>(tensor))
}

/// An f32 tensor within the finite numbers: a gradient of zero times an infinite slope would be
/// NaN.
pub(super) fn finite<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    B::float_clamp(tensor, (-MOST).into(), MOST.into())
}

/// Zero, with the gradient of `x`; also where `x` is infinite.
pub(super) fn zero_of<B: Backend>(x: FloatTensor<B>) -> FloatTensor<B> {
    let dtype = bool_dtype::<B>(&x);
    let zero = B::float_sub(x.clone(), B::float_detach(x));
    let is_nan = B::float_is_nan(zero.clone(), dtype);
    B::float_mask_fill(zero, is_nan, 0.0.into())
}

/// `value`, whose gradient with respect to `x` is `slope`. Neither is tracked by autodiff; the
/// slope is finite.
pub(super) fn with_slope<B: Backend>(
    value: FloatTensor<B>,
    x: FloatTensor<B>,
    slope: FloatTensor<B>,
) -> FloatTensor<B> {
    B::float_add(value, B::float_mul(zero_of::<B>(x), slope))
}

/// A function of `x` with its derivative: both are given `x` without autodiff, `slope` also the
/// value.
pub(super) fn function<B: Backend>(
    x: FloatTensor<B>,
    value: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    slope: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> FloatTensor<B> {
    if !super::is_differentiated::<B>(&x) {
        return value(x);
    }
    let constant = B::float_detach(x.clone());
    let value = value(constant.clone());
    let slope = slope(constant, value.clone());
    with_slope::<B>(value, x, slope)
}
