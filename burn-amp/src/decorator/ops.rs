//! Every operation, made from its row.
//!
//! A method gets the common type of its float operands from the policy, casts them to it, calls the inner
//! backend and wraps the result. The macros below do so for each kind of operand and result.
#![deny(clippy::missing_trait_methods)]

use burn_backend::{Backend, FloatDType, TensorMetadata};
use burn_decorator::kind_type;
use burn_decorator::types::*;

use super::attention;
use super::backend::Autocast;
use super::bring::{bring, within};
use super::tensor::AutocastTensor;
use crate::cast::{Arithmetic, Cast, Operands};
use crate::policy::{Policy, current};
use crate::table::class;

/// Shows an operand to the rule, if it is a float tensor.
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
        bring::<B>($x.tensor, $target)
    };
    (Fill $x:ident $target:ident $operands:ident) => {
        within($x, $operands.destination($target))
    };
    (Follow $x:ident $target:ident $operands:ident) => {
        bring::<B>($x.tensor, $operands.destination($target))
    };
    (FloatRef $x:ident $target:ident $operands:ident) => {
        &$x.tensor
    };
    (FloatOpt $x:ident $target:ident $operands:ident) => {
        $x.map(|x| bring::<B>(x.tensor, $target))
    };
    (Floats $x:ident $target:ident $operands:ident) => {
        $x.into_iter()
            .map(|x| bring::<B>(x.tensor, $target))
            .collect()
    };
    (Tensor $x:ident $target:ident $operands:ident) => {
        match $x {
            TensorPrimitive::Float(x) => TensorPrimitive::Float(bring::<B>(x.tensor, $target)),
            TensorPrimitive::QFloat(x) => TensorPrimitive::QFloat(x),
        }
    };
    (Transaction $x:ident $target:ident $operands:ident) => {
        TransactionPrimitive::new(
            $x.read_floats
                .into_iter()
                .map(AutocastTensor::into_inner)
                .collect(),
            $x.read_qfloats,
            $x.read_ints,
            $x.read_bools,
        )
    };
    (QuantParams $x:ident $target:ident $operands:ident) => {
        QuantizationParametersPrimitive {
            scales: $x.scales.tensor,
        }
    };
    ($kind:tt $x:ident $target:ident $operands:ident) => {
        $x
    };
}

/// A result, wrapped for this backend.
macro_rules! wrap {
    (Float $y:expr, $lineage:expr) => {
        AutocastTensor::with_lineage($y, $lineage)
    };
    (FloatOpt $y:expr, $lineage:expr) => {
        $y.map(|y| AutocastTensor::with_lineage(y, $lineage))
    };
    (Tensor $y:expr, $lineage:expr) => {
        match $y {
            TensorPrimitive::Float(y) => {
                TensorPrimitive::Float(AutocastTensor::with_lineage(y, $lineage))
            }
            TensorPrimitive::QFloat(y) => TensorPrimitive::QFloat(y),
        }
    };
    (($a:tt, $b:tt) $y:expr, $lineage:expr) => {{
        let (a, b) = $y;
        (wrap!($a a, $lineage), wrap!($b b, $lineage))
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr, $lineage:expr) => {{
        let y = $y;
        $name { $($field: wrap!($kind y.$field, $lineage)),+ }
    }};
    ($kind:tt $y:expr, $lineage:expr) => {
        $y
    };
}

/// Whether an operation of a work class computes with its operands: one that moves or reads them gains nothing in f32.
macro_rules! computes {
    (view) => {
        false
    };
    (pass) => {
        false
    };
    ($work:ident) => {
        true
    };
}

/// One method.
macro_rules! method {
    // Decomposed over an autodiff backend.
    ($class:ident $work:ident attention($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn attention($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            attention::attention::<B, P>(class!($class), $($arg),*)
        }
    };
    ($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(unused_mut, reason = "rows without float operands")]
            let mut operands = Operands::default();
            $(see!($kind $arg operands);)*
            #[allow(unused_variables, reason = "rows without float operands")]
            let target = target::<P>(&operands, stringify!($op), class!($class), computes!($work));
            wrap!($ret B::$op($(unwrap!($kind $arg target operands)),*), operands.lineage())
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
fn target<P: Policy>(
    operands: &Operands,
    op: &str,
    row: Cast,
    computes: bool,
) -> Option<FloatDType> {
    if operands.is_empty() {
        return None;
    }
    let mode = current::<P>();
    let arithmetic = match mode.arithmetic {
        Arithmetic::F32 if !computes => Arithmetic::AsGiven,
        arithmetic => arithmetic,
    };
    operands.target(mode.class(op, row), arithmetic)
}

burn_decorator::every_ops!(implement);
