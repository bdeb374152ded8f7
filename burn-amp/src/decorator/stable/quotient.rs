//! Division and its remainder.

use burn_backend::{Backend, Scalar, TensorMetadata, tensor::BoolTensor, tensor::FloatTensor};

use super::slope::{above, below, bool_dtype, finite, zero_of};
use super::{Call, Tensor, is_differentiated};
use crate::decorator::ops::Row;
use crate::decorator::origin::Origin;
use crate::decorator::tensor::AutocastTensor;
use crate::policy::Policy;

/// `a / b`, with PyTorch's gradient of `b`, `-(g / b) (a / b)`: Burn's has `b^2`. In f32, rounded
/// once.
pub(in crate::decorator) fn float_div<B: Backend, P: Policy>(
    row: Row,
    a: Tensor<B>,
    b: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&a, &b]);
    // Norms divide f32 tensors by statistics of rows, which are in range: Burn's own gradient costs
    // less there.
    let is_broadcast = a.tensor.shape() != b.tensor.shape();
    let is_single = !a.is_low() && !b.is_low();
    if !call.mends || (is_single && is_broadcast) {
        let result = B::float_div(a.brought::<B>(call.target), b.brought::<B>(call.target));
        return call.wrap::<B>(result);
    }
    let dtype = call.target.unwrap_or(a.tensor.dtype().into());
    let quotient = divide::<B>(a.raised::<B>(), divisor::<B>(b));
    if !call.is_low {
        return call.wrap::<B>(quotient);
    }
    AutocastTensor::with_lineage(B::float_cast(quotient.clone(), dtype), call.lineage)
        .with_origin(Origin::rounded(quotient))
}

/// The divisor in f32. burn-nn's `RmsNorm` casts its root mean square to the low type before it
/// divides by it: then this is what was cast.
fn divisor<B: Backend>(b: Tensor<B>) -> FloatTensor<B> {
    let cast = match b.origin.as_deref() {
        Some(Origin::Low(low)) => low.divisor(),
        _ => None,
    };
    cast.unwrap_or_else(|| b.raised::<B>())
}

/// The tape gets `(a - (b - b) q) / c`, where `q` is the quotient and `c` is `b`, both without
/// autodiff.
fn divide<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> FloatTensor<B> {
    if !is_differentiated::<B>(&b) {
        return B::float_div(a, b);
    }
    let divisor = B::float_detach(b.clone());
    let quotient = B::float_div(B::float_detach(a.clone()), divisor.clone());
    let along = B::float_mul(zero_of::<B>(b), finite::<B>(quotient));
    B::float_div(B::float_sub(a, along), divisor)
}

/// The remainder by a number, computed in f32 and rounded once; that of a tensor below the divisor
/// is exact.
pub(in crate::decorator) fn float_remainder_scalar<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    divisor: Scalar,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let number: f64 = divisor.elem();
    if !call.mends || !call.is_low || number == 0.0 {
        return call.wrap::<B>(B::float_remainder_scalar(
            x.brought::<B>(call.target),
            divisor,
        ));
    }
    let dtype = call.target.unwrap_or(x.tensor.dtype().into());
    let x = x.raised::<B>();
    let constant = B::float_detach(x.clone());
    let shifted = B::float_add_scalar(constant.clone(), divisor);
    let is_opposite = if number > 0.0 {
        below::<B>(&constant, 0.0)
    } else {
        above::<B>(&constant, 0.0)
    };
    let is_small = below::<B>(&B::float_abs(constant.clone()), number.abs());
    let small = B::float_mask_where(constant.clone(), is_opposite, shifted);
    let value = B::float_mask_where(
        B::float_remainder_scalar(constant, divisor),
        is_small,
        small,
    );
    call.wrap::<B>(B::float_cast(B::float_add(value, zero_of::<B>(x)), dtype))
}

/// As [`float_remainder_scalar`].
pub(in crate::decorator) fn float_remainder<B: Backend, P: Policy>(
    row: Row,
    a: Tensor<B>,
    b: Tensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&a, &b]);
    if !call.mends || !call.is_low {
        let result = B::float_remainder(a.brought::<B>(call.target), b.brought::<B>(call.target));
        return call.wrap::<B>(result);
    }
    let dtype = call.target.unwrap_or(a.tensor.dtype().into());
    let (a, b) = (a.raised::<B>(), b.raised::<B>());
    let [x, divisor] = [&a, &b].map(|tensor| B::float_detach(tensor.clone()));
    let signs = B::float_mul(B::float_sign(x.clone()), B::float_sign(divisor.clone()));
    let is_opposite = below::<B>(&signs, 0.0);
    let is_small = lower::<B>(B::float_abs(x.clone()), B::float_abs(divisor.clone()));
    let shifted = B::float_add(x.clone(), divisor.clone());
    // Broadcast, as the shifted operand is.
    let same = B::float_expand(x.clone(), shifted.shape());
    let small = B::float_mask_where(same, is_opposite, shifted);
    let large = B::float_remainder(x.clone(), divisor.clone());
    let value = B::float_mask_where(large, is_small, small);
    let times = finite::<B>(B::float_floor(B::float_div(x, divisor)));
    let along = B::float_sub(zero_of::<B>(a), B::float_mul(zero_of::<B>(b), times));
    call.wrap::<B>(B::float_cast(B::float_add(value, along), dtype))
}

fn lower<B: Backend>(a: FloatTensor<B>, b: FloatTensor<B>) -> BoolTensor<B> {
    let dtype = bool_dtype::<B>(&a);
    B::float_lower(a, b, dtype)
}
