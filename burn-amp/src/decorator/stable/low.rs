//! Functions that autocast leaves in the type of their operand, as PyTorch does, whose kernels
//! compute in f32 and round once.
//!
//! Where the backend's kernel does not (`native.rs`), value and derivative are computed in f32
//! here, and each is rounded once. The tape keeps the derivative, in the low type, in place of the
//! operand.

use burn_backend::{Backend, DType, FloatDType, TensorMetadata, tensor::FloatTensor};

use super::native::{Points, is_exact};
use super::slope::zero_of;
use super::{Call, Tensor, is_differentiated};
use crate::decorator::ops::Row;

/// How large a derivative is.
#[derive(Clone, Copy)]
pub(super) enum Derivative {
    /// Bounded.
    Bounded,
    /// Infinite at an end of the domain, where the largest number of the low type stands for it: a
    /// gradient of zero times an infinite slope would be NaN.
    Infinite,
    /// Bounded, of a function that is finite at infinity: its gradient there is zero, by a mask
    /// that the tape keeps besides.
    Vanishing,
}

/// The type in which a call computes.
fn dtype<B: Backend>(call: &Call, x: &Tensor<B>) -> DType {
    call.target.map_or(x.tensor.dtype(), DType::from)
}

/// Whether a low result has to be composed in f32, because the backend's kernel in the low type
/// loses more than one rounding.
pub(super) fn is_composed<B: Backend>(
    call: &Call,
    row: Row,
    x: &Tensor<B>,
    kernel: fn(FloatTensor<B>) -> FloatTensor<B>,
    points: Points,
) -> bool {
    if !call.mends || !call.is_low {
        return false;
    }
    let device = B::float_device(&x.tensor);
    !is_exact::<B>(row.op, &device, dtype::<B>(call, x), kernel, points)
}

/// The operand in f32, without autodiff.
pub(super) fn constant<B: Backend>(x: &Tensor<B>) -> FloatTensor<B> {
    B::float_detach(x.clone().raised::<B>())
}

/// `value`, with `slope` as its derivative by `x`, both f32 and without autodiff, rounded to the
/// type of the call.
pub(super) fn rounded<B: Backend>(
    call: &Call,
    x: Tensor<B>,
    value: FloatTensor<B>,
    derivative: Derivative,
    slope: impl FnOnce() -> FloatTensor<B>,
) -> Tensor<B> {
    let dtype: FloatDType = dtype::<B>(call, &x).into();
    let value = B::float_cast(value, dtype);
    let operand = x.brought::<B>(call.target);
    if !is_differentiated::<B>(&operand) {
        return call.wrap::<B>(value);
    }
    let slope = match derivative {
        Derivative::Bounded | Derivative::Vanishing => slope(),
        Derivative::Infinite => {
            let range = dtype.finfo();
            B::float_clamp(slope(), range.min.into(), range.max.into())
        }
    };
    let zero = match derivative {
        Derivative::Vanishing => zero_of::<B>(operand),
        // Without the mask, for its bytes: NaN where `x` is infinite.
        Derivative::Bounded | Derivative::Infinite => {
            B::float_sub(operand.clone(), B::float_detach(operand))
        }
    };
    let along = B::float_mul(zero, B::float_cast(slope, dtype));
    call.wrap::<B>(B::float_add(value, along))
}
