//! Operations whose formula in Burn leaves the range, or loses the digits, of a low type: in their
//! value, or in the gradient that autodiff computes inside of this decorator.
//!
//! A formula is mended by what is put on autodiff's tape in its place, from operations of the inner
//! backend, so that any decorator and backend can be inside:
//!
//! - **in f32, rounded once** (`number.rs`): the operand is cast to f32 and the result back. For
//!   operations that save nothing for backward, as those with a number.
//! - **with its own slope** (`slope.rs`): the value and the derivative are computed without
//!   autodiff, and the tape gets `value + (x - x) slope`, whose backward is a product. The slope is
//!   kept in place of the operand.
//! - **in f32, rounded once, with its own slope** (`low.rs`): as the last, where a backend's kernel
//!   in the low type is worse (`native.rs` asks it). The slope is kept in the low type.
//! - **again from the operands** (`../origin.rs`): the result is computed as ever, and in f32 where
//!   an f32 operation takes it.
//! - **in another class** (`outer.rs`): what is no sum of products is not lowered.
//!
//! `activation.rs`, `combine.rs`, `function.rs`, `number.rs`, `outer.rs`, `product.rs`,
//! `quotient.rs` and `view.rs` are the operations; `accurate.rs` are functions in f32 that keep
//! their digits near zero.

mod accurate;
mod activation;
mod combine;
mod function;
mod low;
mod native;
mod number;
mod outer;
mod product;
mod quotient;
mod slope;
mod view;

use burn_backend::{Backend, DType, FloatDType, TensorMetadata, tensor::FloatTensor};

use super::ops::{Row, target};
use super::tensor::AutocastTensor;
use crate::cast::{Lineage, Operands, is_low};
use crate::policy::{Mode, Policy};

pub(super) use activation::{gelu, log_sigmoid, sigmoid};
pub(super) use combine::{float_mul, float_sub};
pub(super) use function::{
    float_acosh, float_asinh, float_atanh, float_erf, float_exp, float_log, float_log1p,
    float_powf_scalar, float_powi_scalar, float_sqrt, float_tanh,
};
pub(super) use number::{
    float_abs, float_add_scalar, float_clamp, float_clamp_max, float_clamp_min, float_div_scalar,
    float_mul_scalar, float_neg, float_sub_scalar, leaky_relu, scaled,
};
pub(super) use outer::float_matmul;
pub(super) use product::{float_prod, float_prod_dim};
pub(super) use quotient::{float_div, float_remainder, float_remainder_scalar};
pub(super) use view::{
    float_cast, float_grid_sample_2d, float_permute, float_reshape, float_swap_dims,
    float_transpose,
};

/// A float tensor of the decorator.
type Tensor<B> = AutocastTensor<FloatTensor<B>>;

/// What is decided for one call of an operation.
struct Call {
    /// The type that the operands are brought to.
    target: Option<FloatDType>,
    /// The lineage of the result.
    lineage: Lineage,
    /// Whether formulas are mended: in a mode that lowers, except in f64. Elsewhere the inner
    /// backend's operation runs as it is.
    mends: bool,
    /// Whether the results are low.
    is_low: bool,
}

impl Call {
    fn new<B: Backend, P: Policy>(row: Row, operands: &[&Tensor<B>]) -> Self {
        let is_double = |operand: &&Tensor<B>| operand.tensor.dtype() == DType::F64;
        let mut seen = Operands::default();
        for operand in operands {
            seen.see(operand.tensor.dtype().into(), operand.lineage);
        }
        let target = target::<P>(&seen, row);
        let is_low = match target {
            Some(target) => is_low(target),
            None => operands[0].is_low(),
        };
        Self {
            target,
            lineage: seen.lineage(),
            mends: Mode::current::<P>().low().is_some() && !operands.iter().any(is_double),
            is_low,
        }
    }

    /// Whether a low operand is raised to f32 by this call.
    fn raises<B: Backend>(&self, operand: &Tensor<B>) -> bool {
        self.mends && operand.is_low() && self.target == Some(FloatDType::F32)
    }

    fn wrap<B: Backend>(&self, result: FloatTensor<B>) -> Tensor<B> {
        AutocastTensor::result(result, self.lineage)
    }
}

/// Whether autodiff may track the tensor.
fn is_differentiated<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    B::ad_enabled(&B::float_device(tensor))
}
