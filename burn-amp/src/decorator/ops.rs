//! Every operation, made from its row.
//!
//! A method gets the common type of its float operands from the policy, casts them to it, calls the inner
//! backend and wraps the result. The macros below do so for each kind of operand and result.
#![deny(clippy::missing_trait_methods)]

use burn_backend::{Backend, FloatDType, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::attention;
use super::backend::Autocast;
use super::bring::{bring, within};
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
        bring::<B>($x.tensor, $target)
    };
    (Fill $x:ident $target:ident $operands:ident) => {
        within::<P>($x, $operands.destination($target))
    };
    (Follow $x:ident $target:ident $operands:ident) => {
        bring::<B>($x.tensor, $operands.destination($target))
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
        map_operand!($kind $x, |x: FloatTensor<Self>| bring::<B>(x.tensor, $target))
    };
}

/// Whether an operation of a work class computes with its operands: one that moves or reads them gains nothing in f32.
const fn computes(work: &str) -> bool {
    !matches!(work.as_bytes(), b"view" | b"pass")
}

/// One method.
macro_rules! method {
    // Decomposed over an autodiff backend.
    ($class:ident $work:ident attention($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn attention($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            attention::attention::<B, P>(Cast::of(stringify!($class)), $($arg),*)
        }
    };
    ($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(unused_mut, reason = "rows without float operands")]
            let mut operands = Operands::default();
            $(see!($kind $arg operands);)*
            #[allow(unused_variables, reason = "rows without float operands")]
            let target = {
                const ROW: (Cast, bool) = (Cast::of(stringify!($class)), computes(stringify!($work)));
                target::<P>(&operands, stringify!($op), ROW)
            };
            map_result!($ret B::$op($(unwrap!($kind $arg target operands)),*), |y| {
                AutocastTensor::with_lineage(y, operands.lineage())
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
fn target<P: Policy>(
    operands: &Operands,
    op: &str,
    (row, computes): (Cast, bool),
) -> Option<FloatDType> {
    if operands.is_empty() {
        return None;
    }
    let mode = Mode::current::<P>();
    let arithmetic = match mode.arithmetic {
        Arithmetic::F32 if !computes => Arithmetic::AsGiven,
        arithmetic => arithmetic,
    };
    operands.target(mode.class(op, row), arithmetic)
}

burn_decorator::every_ops!(implement);
