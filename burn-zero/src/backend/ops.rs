//! Every operation, made from its row.
//!
//! A leaf that is a known parameter is hooked on its way in; a result only tells how deep the graph is by now.
#![deny(clippy::missing_trait_methods)]

use burn_decorator::kind_type;
use burn_decorator::types::*;

use super::attached::{Depth, ask, enter};
use super::sharded::Sharded;
use super::stream::draw;
use super::tape::Tape;

/// How deep an operand is.
macro_rules! see {
    (Float $x:ident $depth:ident) => {
        $depth.see::<A>(&$x)
    };
    (Follow $x:ident $depth:ident) => {
        $depth.see::<A>(&$x)
    };
    (FloatOpt $x:ident $depth:ident) => {
        if let Some(x) = &$x {
            $depth.see::<A>(x)
        }
    };
    (Floats $x:ident $depth:ident) => {
        for x in &$x {
            $depth.see::<A>(x)
        }
    };
    (Tensor $x:ident $depth:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            $depth.see::<A>(x)
        }
    };
    ($kind:tt $x:ident $depth:ident) => {};
}

/// An operand of an operation that is recorded, hooked if it is a parameter.
macro_rules! hook {
    (Float $x:ident $depth:ident) => {
        enter::<A>($x, $depth)
    };
    (Follow $x:ident $depth:ident) => {
        enter::<A>($x, $depth)
    };
    (FloatOpt $x:ident $depth:ident) => {
        $x.map(|x| enter::<A>(x, $depth))
    };
    (Floats $x:ident $depth:ident) => {
        $x.into_iter().map(|x| enter::<A>(x, $depth)).collect()
    };
    (Tensor $x:ident $depth:ident) => {
        match $x {
            TensorPrimitive::Float(x) => TensorPrimitive::Float(enter::<A>(x, $depth)),
            TensorPrimitive::QFloat(x) => TensorPrimitive::QFloat(x),
        }
    };
    ($kind:tt $x:ident $depth:ident) => {
        pass!($kind $x)
    };
}

/// An operand as it is, as one of the inner backend.
macro_rules! pass {
    (Tensor $x:ident) => {
        match $x {
            TensorPrimitive::Float(x) => TensorPrimitive::Float(x),
            TensorPrimitive::QFloat(x) => TensorPrimitive::QFloat(x),
        }
    };
    (Transaction $x:ident) => {
        TransactionPrimitive::new($x.read_floats, $x.read_qfloats, $x.read_ints, $x.read_bools)
    };
    (QuantParams $x:ident) => {
        QuantizationParametersPrimitive { scales: $x.scales }
    };
    ($kind:tt $x:ident) => {
        $x
    };
}

/// A result as one of this backend.
macro_rules! leave {
    (Float $y:expr, $depth:ident) => {{
        let y = $y;
        $depth.leave::<A>(&y);
        y
    }};
    (Tensor $y:expr, $depth:ident) => {
        match $y {
            TensorPrimitive::Float(y) => TensorPrimitive::Float(leave!(Float y, $depth)),
            TensorPrimitive::QFloat(y) => TensorPrimitive::QFloat(y),
        }
    };
    (FloatOpt $y:expr, $depth:ident) => {
        $y.map(|y| leave!(Float y, $depth))
    };
    (($a:tt, $b:tt) $y:expr, $depth:ident) => {{
        let (a, b) = $y;
        (leave!($a a, $depth), leave!($b b, $depth))
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr, $depth:ident) => {{
        let y = $y;
        $name { $($field: leave!($kind y.$field, $depth)),+ }
    }};
    ($kind:tt $y:expr, $depth:ident) => {
        $y
    };
}

/// One method. What makes no float tensor leaves nothing on the tape: a hook there would never be met again.
macro_rules! method {
    // These two ask for the leaf itself.
    (float_detach($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @pass float_detach($($arg: $kind),*) -> $ret } };
    (float_set_require_grad($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @pass float_set_require_grad($($arg: $kind),*) -> $ret } };
    (float_is_require_grad($tensor:ident: FloatRef) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad($tensor: kind_type!(FloatRef)) -> kind_type!($ret) {
            ask::<A>($tensor);
            A::float_is_require_grad($tensor)
        }
    };
    // These two draw.
    (float_random($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @draw float_random($($arg: $kind),*) -> $ret } };
    (int_random($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @draw int_random($($arg: $kind),*) -> $ret } };
    ($op:ident($($arg:ident: $kind:tt),*) -> Float) => { method! { @hook $op($($arg: $kind),*) -> Float } };
    ($op:ident($($arg:ident: $kind:tt),*) -> Tensor) => { method! { @hook $op($($arg: $kind),*) -> Tensor } };
    ($op:ident($($arg:ident: $kind:tt),*) -> ($a:tt, $b:tt)) => { method! { @hook $op($($arg: $kind),*) -> ($a, $b) } };
    ($op:ident($($arg:ident: $kind:tt),*) -> {$($result:tt)*}) => { method! { @hook $op($($arg: $kind),*) -> {$($result)*} } };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @pass $op($($arg: $kind),*) -> $ret } };

    (@hook $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(unused_mut, unused_variables, reason = "rows without float operands or results")]
            let mut depth = Depth::now();
            $(see!($kind $arg depth);)*
            leave!($ret A::$op($(hook!($kind $arg depth)),*), depth)
        }
    };
    (@draw $op:ident($shape:ident: $a:tt, $distribution:ident: $b:tt, $device:ident: $c:tt, $dtype:ident: $d:tt) -> $ret:tt) => {
        #[inline]
        fn $op(
            $shape: kind_type!($a),
            $distribution: kind_type!($b),
            $device: kind_type!($c),
            $dtype: kind_type!($d),
        ) -> kind_type!($ret) {
            draw::<A, _>($device, || A::$op($shape, $distribution, $device, $dtype))
        }
    };
    (@pass $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            A::$op($(pass!($kind $arg)),*)
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $recipe:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<A: Tape> $trait<Self> for Sharded<A> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::float_ops!(implement);
burn_decorator::int_ops!(implement);
burn_decorator::bool_ops!(implement);
burn_decorator::quantized_ops!(implement);
burn_decorator::module_ops!(implement);
burn_decorator::activation_ops!(implement);
burn_decorator::transaction_ops!(implement);
