//! Every operation, made from its row.
//!
//! A method gets the common type of its float operands from the policy, casts them to it, calls the
//! inner backend and wraps the result. The macros below do so for each kind of operand and result.
#![deny(clippy::missing_trait_methods)]

use burn_backend::{Backend, FloatDType, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::attention;
use super::backend::Autocast;
use super::bring::within;
use super::stable;
use super::tensor::AutocastTensor;
use crate::cast::{Arithmetic, Cast, Operands};
use crate::policy::{Mode, Policy};

/// Adds an operand to `$operands`, if it is a float tensor.
macro_rules! see {
    (Float $x:ident $operands:ident) => {
        $operands.see($x.tensor.dtype().into(), $x.lineage)
    };
    (FloatOpt $x:ident $operands:ident) => {
        if let Some(x) = &$x {
            $operands.see(x.tensor.dtype().into(), x.lineage)
        }
    };
    (Floats $x:ident $operands:ident) => {
        for x in &$x {
            $operands.see(x.tensor.dtype().into(), x.lineage)
        }
    };
    (Follow $x:ident $operands:ident) => {
        $operands.mark($x.lineage)
    };
    (Tensor $x:ident $operands:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            $operands.see(x.tensor.dtype().into(), x.lineage)
        }
    };
    ($kind:tt $x:ident $operands:ident) => {};
}

/// An operand, converted for the inner backend.
macro_rules! unwrap {
    (Float $x:ident $target:ident $operands:ident) => {
        $x.brought::<B>($target)
    };
    (Fill $x:ident $target:ident $operands:ident) => {
        within::<P>($x, $operands.destination($target))
    };
    (Follow $x:ident $target:ident $operands:ident) => {
        $x.brought::<B>($operands.destination($target))
    };
    (FloatRef $x:ident $target:ident $operands:ident) => {
        &$x.tensor
    };
    // The operation does not compute with them.
    (QuantParams $x:ident $target:ident $operands:ident) => {
        map_operand!(QuantParams $x, AutocastTensor::into_inner)
    };
    (Transaction $x:ident $target:ident $operands:ident) => {
        map_operand!(Transaction $x, AutocastTensor::into_inner)
    };
    ($kind:tt $x:ident $target:ident $operands:ident) => {
        map_operand!($kind $x, |x: FloatTensor<Self>| x.brought::<B>($target))
    };
}

/// What the table says of an operation.
#[derive(Clone, Copy)]
pub(super) struct Row {
    /// Its name, such as `float_tanh`.
    pub(super) op: &'static str,
    class: Cast,
    /// Whether it computes with its operands.
    computes: bool,
}

impl Row {
    /// The same row in another class.
    pub(super) fn with_class(self, class: Cast) -> Self {
        Self { class, ..self }
    }
}

/// Whether an operation of a work class computes with its operands: one that moves or reads them
/// gains nothing in f32.
const fn computes(work: &str) -> bool {
    !matches!(work.as_bytes(), b"view" | b"pass")
}

/// A row as a constant.
macro_rules! row {
    ($class:ident $work:ident $op:ident) => {{
        const ROW: Row = Row {
            op: stringify!($op),
            class: Cast::of(stringify!($class)),
            computes: computes(stringify!($work)),
        };
        ROW
    }};
}

/// One method.
macro_rules! method {
    // Decomposed over an autodiff backend.
    ($class:ident $work:ident attention($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn attention($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            attention::attention::<B, P>(Cast::of(stringify!($class)), $($arg),*)
        }
    };
    // Whose formula in Burn fails in a low type.
    ($class:ident $work:ident float_matmul $($row:tt)*) => { method! { @stable $class $work float_matmul $($row)* } };
    ($class:ident $work:ident float_mul_scalar $($row:tt)*) => { method! { @stable $class $work float_mul_scalar $($row)* } };
    ($class:ident $work:ident float_div_scalar $($row:tt)*) => { method! { @stable $class $work float_div_scalar $($row)* } };
    ($class:ident $work:ident float_add_scalar $($row:tt)*) => { method! { @stable $class $work float_add_scalar $($row)* } };
    ($class:ident $work:ident float_sub_scalar $($row:tt)*) => { method! { @stable $class $work float_sub_scalar $($row)* } };
    ($class:ident $work:ident float_remainder_scalar $($row:tt)*) => { method! { @stable $class $work float_remainder_scalar $($row)* } };
    ($class:ident $work:ident float_clamp $($row:tt)*) => { method! { @stable $class $work float_clamp $($row)* } };
    ($class:ident $work:ident float_clamp_min $($row:tt)*) => { method! { @stable $class $work float_clamp_min $($row)* } };
    ($class:ident $work:ident float_clamp_max $($row:tt)*) => { method! { @stable $class $work float_clamp_max $($row)* } };
    ($class:ident $work:ident float_neg $($row:tt)*) => { method! { @stable $class $work float_neg $($row)* } };
    ($class:ident $work:ident float_abs $($row:tt)*) => { method! { @stable $class $work float_abs $($row)* } };
    ($class:ident $work:ident float_sub $($row:tt)*) => { method! { @stable $class $work float_sub $($row)* } };
    ($class:ident $work:ident float_mul $($row:tt)*) => { method! { @stable $class $work float_mul $($row)* } };
    ($class:ident $work:ident float_div $($row:tt)*) => { method! { @stable $class $work float_div $($row)* } };
    ($class:ident $work:ident float_remainder $($row:tt)*) => { method! { @stable $class $work float_remainder $($row)* } };
    ($class:ident $work:ident float_exp $($row:tt)*) => { method! { @stable $class $work float_exp $($row)* } };
    ($class:ident $work:ident float_log $($row:tt)*) => { method! { @stable $class $work float_log $($row)* } };
    ($class:ident $work:ident float_log1p $($row:tt)*) => { method! { @stable $class $work float_log1p $($row)* } };
    ($class:ident $work:ident float_sqrt $($row:tt)*) => { method! { @stable $class $work float_sqrt $($row)* } };
    ($class:ident $work:ident float_powf_scalar $($row:tt)*) => { method! { @stable $class $work float_powf_scalar $($row)* } };
    ($class:ident $work:ident float_powi_scalar $($row:tt)*) => { method! { @stable $class $work float_powi_scalar $($row)* } };
    ($class:ident $work:ident float_asinh $($row:tt)*) => { method! { @stable $class $work float_asinh $($row)* } };
    ($class:ident $work:ident float_acosh $($row:tt)*) => { method! { @stable $class $work float_acosh $($row)* } };
    ($class:ident $work:ident float_atanh $($row:tt)*) => { method! { @stable $class $work float_atanh $($row)* } };
    ($class:ident $work:ident float_tanh $($row:tt)*) => { method! { @stable $class $work float_tanh $($row)* } };
    ($class:ident $work:ident float_erf $($row:tt)*) => { method! { @stable $class $work float_erf $($row)* } };
    ($class:ident $work:ident float_prod $($row:tt)*) => { method! { @stable $class $work float_prod $($row)* } };
    ($class:ident $work:ident float_prod_dim $($row:tt)*) => { method! { @stable $class $work float_prod_dim $($row)* } };
    ($class:ident $work:ident leaky_relu $($row:tt)*) => { method! { @stable $class $work leaky_relu $($row)* } };
    ($class:ident $work:ident gelu $($row:tt)*) => { method! { @stable $class $work gelu $($row)* } };
    ($class:ident $work:ident sigmoid $($row:tt)*) => { method! { @stable $class $work sigmoid $($row)* } };
    ($class:ident $work:ident log_sigmoid $($row:tt)*) => { method! { @stable $class $work log_sigmoid $($row)* } };
    ($class:ident $work:ident float_grid_sample_2d $($row:tt)*) => { method! { @stable $class $work float_grid_sample_2d $($row)* } };
    ($class:ident $work:ident float_cast $($row:tt)*) => { method! { @stable $class $work float_cast $($row)* } };
    ($class:ident $work:ident float_reshape $($row:tt)*) => { method! { @stable $class $work float_reshape $($row)* } };
    ($class:ident $work:ident float_transpose $($row:tt)*) => { method! { @stable $class $work float_transpose $($row)* } };
    ($class:ident $work:ident float_swap_dims $($row:tt)*) => { method! { @stable $class $work float_swap_dims $($row)* } };
    ($class:ident $work:ident float_permute $($row:tt)*) => { method! { @stable $class $work float_permute $($row)* } };
    (@stable $class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            stable::$op::<B, P>(row!($class $work $op), $($arg),*)
        }
    };
    ($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(unused_mut, reason = "rows without float operands")]
            let mut operands = Operands::default();
            $(see!($kind $arg operands);)*
            #[allow(unused_variables, reason = "rows without float operands")]
            let target = target::<P>(&operands, row!($class $work $op));
            map_result!($ret B::$op($(unwrap!($kind $arg target operands)),*), |y| {
                AutocastTensor::result(y, operands.lineage())
            })
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend, P: Policy> $trait<Self> for Autocast<B, P> {
            $(method! { $class $work $op($($arg: $kind),*) -> $ret })*
        }
    };
}

/// The type to which the operands of an operation are cast under the mode of this thread.
#[inline]
pub(super) fn target<P: Policy>(operands: &Operands, row: Row) -> Option<FloatDType> {
    if operands.is_empty() {
        return None;
    }
    let mode = Mode::current::<P>();
    let arithmetic = match mode.arithmetic {
        Arithmetic::F32 if !row.computes => Arithmetic::AsGiven,
        arithmetic => arithmetic,
    };
    operands.target(mode.class(row.op, row.class), arithmetic)
}

burn_decorator::every_ops!(implement);
