//! Every operation, made from its row of the operation table.
//!
//! An operand that is a registered leaf is hooked; a result only updates the depth of the graph.
#![deny(clippy::missing_trait_methods)]

use core::convert::identity;

use burn_decorator::autodiff::TapeBackend;
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::leaves::{Depth, ask};
use super::sharded::Sharded;
use super::stream::draw;
use super::tape::enter;

/// Raises `$depth` to that of an operand.
macro_rules! see {
    (Float $x:ident $depth:ident) => {
        $depth.see(&$x)
    };
    (Follow $x:ident $depth:ident) => {
        $depth.see(&$x)
    };
    (FloatOpt $x:ident $depth:ident) => {
        $x.iter().for_each(|x| $depth.see(x))
    };
    (Floats $x:ident $depth:ident) => {
        $x.iter().for_each(|x| $depth.see(x))
    };
    (Tensor $x:ident $depth:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            $depth.see(x)
        }
    };
    ($kind:tt $x:ident $depth:ident) => {};
}

/// One method. An operation without float result records nothing on the tape, so a hook there would
/// never run.
macro_rules! method {
    // These two need the leaf itself.
    (float_detach($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @pass float_detach($($arg: $kind),*) -> $ret } };
    (float_set_require_grad($($arg:ident: $kind:tt),*) -> $ret:tt) => { method! { @pass float_set_require_grad($($arg: $kind),*) -> $ret } };
    (float_is_require_grad($tensor:ident: FloatRef) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad($tensor: kind_type!(FloatRef)) -> kind_type!($ret) {
            ask($tensor);
            A::float_is_require_grad($tensor)
        }
    };
    // These two draw random numbers.
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
            map_result!($ret A::$op($(map_operand!($kind $arg, |x| enter(x, depth))),*), |y| depth.leave(y))
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
            A::$op($(map_operand!($kind $arg, identity)),*)
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $recipe:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<A: TapeBackend> $trait<Self> for Sharded<A> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
