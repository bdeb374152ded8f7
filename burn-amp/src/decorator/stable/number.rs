//! Operations with a number: computed in f32 with the number as it is, and rounded once, as in
//! PyTorch. The backend would round the number to the tensor's type first.

use burn_backend::{Backend, FloatDType, Scalar, TensorMetadata, tensor::FloatTensor};

use super::function::exp_minus_one;
use super::{Call, Tensor};
use crate::decorator::ops::Row;
use crate::decorator::origin::Origin;
use crate::decorator::tensor::AutocastTensor;
use crate::policy::Policy;

/// Whether a low type holds the number with all its digits.
fn is_held(number: f64, dtype: FloatDType) -> bool {
    let single = number as f32;
    let trailing_zeros = |digits: u32| single.to_bits() & ((1 << digits) - 1) == 0;
    if f64::from(single) != number {
        return false;
    }
    match dtype {
        // f32 without its lower half.
        FloatDType::BF16 => trailing_zeros(16),
        FloatDType::F16 => {
            let range = dtype.finfo();
            let normal = range.min_positive..=range.max;
            number == 0.0 || (normal.contains(&number.abs()) && trailing_zeros(13))
        }
        FloatDType::F32 | FloatDType::F64 | FloatDType::Flex32 => true,
    }
}

/// A low tensor times a number that is not rounded.
pub(in crate::decorator) fn scaled<B: Backend>(x: FloatTensor<B>, number: f64) -> FloatTensor<B> {
    let dtype = x.dtype().into();
    if is_held(number, dtype) {
        return B::float_mul_scalar(x, number.into());
    }
    let x = B::float_cast(x, FloatDType::F32);
    B::float_cast(B::float_mul_scalar(x, number.into()), dtype)
}

/// An operation with numbers on one tensor. In a low type it is computed in f32, unless the type
/// holds all of `numbers`.
fn with_numbers<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    numbers: &[f64],
    run: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    if !call.mends || !call.is_low {
        return call.wrap::<B>(run(x.brought::<B>(call.target)));
    }
    let dtype = call.target.unwrap_or(x.tensor.dtype().into());
    let result = if numbers.iter().all(|number| is_held(*number, dtype)) {
        run(x.clone().brought::<B>(call.target))
    } else {
        B::float_cast(run(x.clone().raised::<B>()), dtype)
    };
    remembering::<B>(call, x, result, run)
}

/// The low result of an operation on `x`, which is computed again in f32 where an f32 operation
/// takes it.
pub(super) fn remembering<B: Backend>(
    call: Call,
    x: Tensor<B>,
    result: FloatTensor<B>,
    run: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> Tensor<B> {
    let x = x.kept();
    let steps = x.steps();
    AutocastTensor::with_lineage(result, call.lineage)
        .with_origin(Origin::computed(steps, move || {
            run(x.clone().raised::<B>())
        }))
}

pub(in crate::decorator) fn float_mul_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    number: Scalar,
) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[number.elem()], move |x| {
        B::float_mul_scalar(x, number)
    })
}

pub(in crate::decorator) fn float_div_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    number: Scalar,
) -> Tensor<B> {
    // Backward multiplies by the reciprocal.
    let numbers = [number.elem(), 1.0 / number.elem::<f64>()];
    with_numbers::<B, P>(row, x, &numbers, move |x| B::float_div_scalar(x, number))
}

pub(in crate::decorator) fn float_add_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    number: Scalar,
) -> Tensor<B> {
    let exponent = match x.origin.as_deref() {
        Some(Origin::Exp { exponent }) if number.elem::<f64>() == 1.0 => Some(exponent.clone()),
        _ => None,
    };
    let run = move |x| B::float_add_scalar(x, number);
    let result = with_numbers::<B, P>(row, x, &[number.elem()], run);
    match exponent {
        Some(exponent) => result.with_origin(Origin::ExpPlusOne { exponent }),
        None => result,
    }
}

pub(in crate::decorator) fn float_sub_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    number: Scalar,
) -> Tensor<B> {
    if let Some(Origin::Exp { exponent }) = x.origin.as_deref()
        && number.elem::<f64>() == 1.0
    {
        return AutocastTensor::with_lineage(exp_minus_one::<B>(exponent.clone()), x.lineage);
    }
    with_numbers::<B, P>(row, x, &[number.elem()], move |x| {
        B::float_sub_scalar(x, number)
    })
}

pub(in crate::decorator) fn leaky_relu<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    slope: Scalar,
) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[slope.elem()], move |x| B::leaky_relu(x, slope))
}

/// A bound that the low types have no finite number for. A bound within the range bounds a low
/// tensor alike when it is rounded.
fn beyond(bound: Scalar) -> f64 {
    let bound: f64 = bound.elem();
    let is_beyond = bound.is_finite() && bound.abs() > FloatDType::F16.finfo().max;
    if is_beyond { bound } else { 0.0 }
}

pub(in crate::decorator) fn float_clamp<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    min: Scalar,
    max: Scalar,
) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[beyond(min), beyond(max)], move |x| {
        B::float_clamp(x, min, max)
    })
}

pub(in crate::decorator) fn float_clamp_min<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    min: Scalar,
) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[beyond(min)], move |x| B::float_clamp_min(x, min))
}

pub(in crate::decorator) fn float_clamp_max<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    max: Scalar,
) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[beyond(max)], move |x| B::float_clamp_max(x, max))
}

// Exact in any type: they pass on what their operand remembers.

pub(in crate::decorator) fn float_neg<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[], B::float_neg)
}

pub(in crate::decorator) fn float_abs<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    with_numbers::<B, P>(row, x, &[], B::float_abs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_held_if_the_type_has_its_digits() {
        for (number, f16, bf16) in [
            (0.0, true, true),
            (1.0, true, true),
            (-0.5, true, true),
            (1.0 / 3.0, false, false),
            (0.1, false, false),
            (2049.0, false, false),
            (2048.0, true, true),
            (257.0, true, false),
            (65536.0, false, true),
            (65504.0, true, false),
            (2e-8, false, false),
            (2f64.powi(-20), false, true),
            (1e300, false, false),
        ] {
            assert_eq!(is_held(number, FloatDType::F16), f16, "{number}");
            assert_eq!(is_held(number, FloatDType::BF16), bf16, "{number}");
        }
    }
}
