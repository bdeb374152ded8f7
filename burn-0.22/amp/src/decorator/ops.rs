//! Every operation, made from its row.

use std::cell::Cell;

use burn_backend::ops::attention::attention_fallback;
use burn_backend::{FloatDType, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::backend::{Autocast, Recorded};
use super::bring::{bring, within};
use crate::cast::{Arithmetic, Cast, Lineage, Operands};
use crate::policy::{self, Configured, Mode, Policy};

thread_local! {
    static IN_SCOPE: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f` with policy `P` on this thread, also where nothing is recorded: a model without
/// autodiff is lowered too, and so would be an optimizer that is called in it.
pub fn autocast<P: Policy, R>(f: impl FnOnce() -> R) -> R {
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            IN_SCOPE.set(self.0);
        }
    }
    let _restore = Restore(IN_SCOPE.replace(true));
    policy::autocast::<P, R>(f)
}

/// What the float operands of a call have in common; those that nothing records are left in the
/// type they have.
struct Seen {
    operands: Operands,
    recorded: bool,
}

impl Seen {
    #[inline]
    fn new() -> Self {
        Self {
            operands: Operands::default(),
            recorded: IN_SCOPE.get(),
        }
    }

    #[inline]
    fn see<B: Recorded>(&mut self, tensor: &FloatTensor<B>) {
        self.operands.see(tensor.dtype().into(), Lineage::Forward);
        self.recorded |= B::is_recorded(tensor);
    }

    /// The type to which the operands are cast.
    #[inline]
    fn target(&mut self, op: &str, (row, computes): (Cast, bool)) -> Option<FloatDType> {
        if self.operands.is_empty() {
            return None;
        }
        if !self.recorded {
            self.operands.mark(Lineage::Gradient);
        }
        let mode = Mode::current::<Configured>();
        let arithmetic = match mode.arithmetic {
            Arithmetic::F32 if !computes => Arithmetic::AsGiven,
            arithmetic => arithmetic,
        };
        self.operands.target(mode.class(op, row), arithmetic)
    }
}

/// Shows an operand to the rule, if it is a float tensor.
macro_rules! see {
    (Float $x:ident $seen:ident) => {
        $seen.see::<B>(&$x)
    };
    (FloatOpt $x:ident $seen:ident) => {
        $x.iter().for_each(|x| $seen.see::<B>(x))
    };
    (Floats $x:ident $seen:ident) => {
        $x.iter().for_each(|x| $seen.see::<B>(x))
    };
    (Follow $x:ident $seen:ident) => {
        $seen.recorded |= B::is_recorded(&$x)
    };
    (Tensor $x:ident $seen:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            $seen.see::<B>(x)
        }
    };
    ($kind:tt $x:ident $seen:ident) => {};
}

/// An operand, converted for the inner backend.
macro_rules! convert {
    (Fill $x:ident $target:ident $seen:ident) => {
        within::<Configured>($x, $seen.operands.destination($target))
    };
    (Follow $x:ident $target:ident $seen:ident) => {
        bring::<B>($x, $seen.operands.destination($target))
    };
    (QuantParams $x:ident $target:ident $seen:ident) => {
        map_operand!(QuantParams $x, |x| x)
    };
    (Transaction $x:ident $target:ident $seen:ident) => {
        map_operand!(Transaction $x, |x| x)
    };
    ($kind:tt $x:ident $target:ident $seen:ident) => {
        map_operand!($kind $x, |x| bring::<B>(x, $target))
    };
}

/// Whether an operation of a work class computes with its operands: one that moves or reads them
/// gains nothing in f32.
const fn computes(work: &str) -> bool {
    !matches!(work.as_bytes(), b"view" | b"pass")
}

/// One method.
macro_rules! method {
    // Autodiff's own attention runs on the backend below it, where this table does not reach:
    // composed here over autodiff.
    ($class:ident $work:ident attention($q:ident: $a:tt, $k:ident: $b:tt, $v:ident: $c:tt, $mask:ident: $d:tt, $bias:ident: $e:tt, $options:ident: $f:tt) -> $ret:tt) => {
        fn attention($q: kind_type!($a), $k: kind_type!($b), $v: kind_type!($c), $mask: kind_type!($d), $bias: kind_type!($e), $options: kind_type!($f)) -> kind_type!($ret) {
            let mut seen = Seen::new();
            for x in [&$q, &$k, &$v].into_iter().chain(&$bias) {
                seen.see::<B>(x);
            }
            let target = seen.target("attention", (Cast::of(stringify!($class)), true));
            let [$q, $k, $v] = [$q, $k, $v].map(|x| bring::<B>(x, target));
            let $bias = $bias.map(|x| bring::<B>(x, target));
            if Mode::current::<Configured>().low().is_some() && B::is_recorded(&$q) {
                return attention_fallback::<Self>($q, $k, $v, $mask, $bias, $options);
            }
            B::attention($q, $k, $v, $mask, $bias, $options)
        }
    };
    ($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(unused_mut, reason = "rows without float operands")]
            let mut seen = Seen::new();
            $(see!($kind $arg seen);)*
            #[allow(unused_variables, reason = "rows without float operands")]
            let target = {
                const ROW: (Cast, bool) = (Cast::of(stringify!($class)), computes(stringify!($work)));
                seen.target(stringify!($op), ROW)
            };
            map_result!($ret B::$op($(convert!($kind $arg target seen)),*), |y| y)
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Recorded> $trait<Self> for Autocast<B> {
            $(method! { $class $work $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
