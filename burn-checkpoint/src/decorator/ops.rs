//! Every operation, made from its row.
//!
//! Outside of scopes and budgets a method calls the inner backend and no more. Inside, a row whose result can be computed
//! again (every work class but `fixed` and `pass`) is recorded: its operands are saved for a recipe, and its result becomes a
//! node. So is a row whose operands are all [delivered](crate::delivered()), anywhere.
#![deny(clippy::missing_trait_methods)]

use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_decorator::kind_type;
use burn_decorator::types::*;

use super::backend::Remat;
use super::bits;
use super::operands::{Delivered, by_form, delivered, inner, load, room, save, see, show, sources};
use super::results::{handles, plain, value};
use crate::again::again;
use crate::call::{self, Argument, Call, Results};
use crate::handle::Handle;
use crate::kind::Value;
use crate::op::OpInfo;
use crate::recipe::{OnUse, Saved, SavedValue, operation};
use crate::request::{self, Request};
use crate::work::Work;
use crate::{clock, context};

/// A result that is float or quantized.
fn tensor<B: Backend>(results: &mut Results<'_, B>) -> TensorPrimitive<Remat<B>> {
    match results.is_quantized() {
        true => TensorPrimitive::QFloat(results.expect()),
        false => TensorPrimitive::Float(results.expect()),
    }
}

/// As a recipe keeps an operand that is float or quantized.
fn save_tensor<B: Backend>(tensor: &TensorPrimitive<Remat<B>>) -> SavedValue<B> {
    match tensor {
        TensorPrimitive::Float(x) => x.save().value,
        TensorPrimitive::QFloat(x) => x.save().value,
    }
}

/// The device is known without the storage.
macro_rules! device {
    ($op:ident($tensor:ident: $kind:tt) -> $ret:tt) => {
        #[inline]
        fn $op($tensor: kind_type!($kind)) -> kind_type!($ret) {
            $tensor.device()
        }
    };
}

/// Keeps the recording of an operation out of its method, so that the method stays short.
#[inline(never)]
fn apart<T>(recorded: impl FnOnce() -> T) -> T {
    recorded()
}

/// What a method does inside of a scope or budget.
macro_rules! managed {
    ($trait:ident pass $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {};
    // Its shape is known only when the future is done: not counted.
    ($trait:ident fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureInt) => {};
    ($trait:ident fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureFloat) => {};
    ($trait:ident fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureBool) => {};
    ($trait:ident fixed $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        if context::records() {
            const OP: &OpInfo = &OpInfo::new(stringify!($op), Work::Fixed, stringify!($trait));
            let mut room = call::Room::default();
            $(room!($kind $arg, room);)*
            let memory = room.make(OP).filter(|memory| memory.retries());
            let mut value = match memory {
                None => value!($ret B::$op($(by_form!(inner $kind $arg)),*)),
                Some(memory) => {
                    let saved = ($(by_form!(save $kind $arg),)*);
                    let run = || {
                        let ($($arg,)*) = &saved;
                        value!($ret B::$op($(by_form!(load $kind $arg)),*))
                    };
                    again(&memory, OP, run, run)
                }
            };
            let mut results = call::fixed::<B>(OP, &mut value);
            return handles!($ret results);
        }
    };
    ($trait:ident new $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        const OP: &OpInfo = &OpInfo::new(stringify!($op), Work::New, stringify!($trait));
        if context::records() {
            recorded!($op($($arg: $kind),*) -> $ret, call => {
                let mut room = call::Room::default();
                $(room!($kind $arg, room);)*
                call.begin_new(room);
            });
        }
    };
    ($trait:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        const OP: &OpInfo = &OpInfo::new(stringify!($op), Work::of(stringify!($work)), stringify!($trait));
        if context::records() || OP.work.passes_delivery() && delivered!($($kind $arg),*) {
            recorded!($op($($arg: $kind),*) -> $ret, call => call.begin(|see| {
                $(by_form!(show $kind $arg, &mut *see);)*
            }));
        }
    };
}

/// Records the operation `OP`, which begins by `$begin`.
macro_rules! recorded {
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt, $call:ident => $begin:expr) => {
        return apart(move || {
            let mut $call = Call::<B>::new(OP);
            $begin;
            let mut recipe = $call.needs_recipe().then(|| {
                let saved = ($(by_form!(save $kind $arg),)*);
                operation::<B, _>(move |visit| {
                    let ($($arg,)*) = &saved;
                    #[allow(unused_variables, reason = "rows without tensors")]
                    if let Some(visit) = visit {
                        $(by_form!(sources $kind $arg, &mut *visit);)*
                        return Value::Absent;
                    }
                    value!($ret B::$op($(by_form!(load $kind $arg)),*))
                })
            });
            let mut value = $call.run(&recipe, move || value!($ret B::$op($(by_form!(inner $kind $arg)),*)));
            let mut results = $call.finish(&mut value, &mut recipe);
            handles!($ret results)
        })
    };
}

/// A view or a cast, whose shape and type are known before it runs: on a delivered tensor it runs when its result is used.
macro_rules! on_use {
    ($trait:ident $work:ident $op:ident($x:ident: $kind:tt $(, $arg:ident: $plain:tt)*) -> $ret:tt, same if $same:expr, $promised:ident => $change:expr) => {
        #[inline]
        fn $op($x: kind_type!($kind) $(, $arg: kind_type!($plain))*) -> kind_type!($ret) {
            if $x.is_delivered() {
                if $same {
                    return $x;
                }
                const OP: &OpInfo = &OpInfo::new(stringify!($op), Work::of(stringify!($work)), stringify!($trait));
                return apart(move || {
                    let mut $promised = call::Promised::like(&$x);
                    $change;
                    let (input, saved) = (save!($kind $x), ($(save!($plain $arg),)*));
                    let recipe = OnUse::new(OP, input, move |$x| {
                        let ($($arg,)*) = &saved;
                        value!($ret B::$op($x $(, load!($plain $arg))*))
                    });
                    Handle::Managed(call::derived(OP, $promised, Arc::new(recipe)))
                });
            }
            managed!($trait $work $op($x: $kind $(, $arg: $plain)*) -> $ret);
            plain!($ret B::$op(inner!($kind $x) $(, inner!($plain $arg))*))
        }
    };
}

/// An operation that returns some operands unchanged.
macro_rules! as_it_is {
    ($is_kept:expr => $trait:ident $work:ident $op:ident($x:ident: $kind:tt $(, $arg:ident: $plain:tt)*) -> $ret:tt) => {
        #[inline]
        fn $op($x: kind_type!($kind) $(, $arg: kind_type!($plain))*) -> kind_type!($ret) {
            if $is_kept {
                return $x;
            }
            managed!($trait $work $op($x: $kind $(, $arg: $plain)*) -> $ret);
            plain!($ret B::$op(inner!($kind $x) $(, inner!($plain $arg))*))
        }
    };
}

/// One method.
macro_rules! method {
    ($trait:ident pass float_device($tensor:ident: $kind:tt) -> $ret:tt) => {
        #[inline]
        fn float_device($tensor: kind_type!($kind)) -> kind_type!($ret) {
            if context::records() {
                clock::asked_for_device($tensor.is_passing_gradient());
            }
            $tensor.device()
        }
    };
    ($trait:ident pass int_device($($arg:ident: $kind:tt),*) -> $ret:tt) => { device!(int_device($($arg: $kind),*) -> $ret); };
    ($trait:ident pass bool_device($($arg:ident: $kind:tt),*) -> $ret:tt) => { device!(bool_device($($arg: $kind),*) -> $ret); };
    ($trait:ident pass q_device($($arg:ident: $kind:tt),*) -> $ret:tt) => { device!(q_device($($arg: $kind),*) -> $ret); };
    ($trait:ident fixed float_from_data($data:ident: $a:tt, $device:ident: $b:tt) -> $ret:tt) => {
        #[inline]
        fn float_from_data($data: kind_type!($a), $device: kind_type!($b)) -> kind_type!($ret) {
            if let Some(request) = Request::take() {
                return Handle::Managed(call::delivered(request, $device));
            }
            if let Some(path) = request::named() {
                let value = Value::Float(B::float_from_data($data, $device));
                return Handle::Managed(call::parameter(path, value));
            }
            managed!($trait fixed float_from_data($data: $a, $device: $b) -> $ret);
            plain!($ret B::float_from_data($data, $device))
        }
    };
    ($trait:ident pass float_into_data($tensor:ident: $kind:tt) -> $ret:tt) => {
        fn float_into_data($tensor: kind_type!($kind)) -> kind_type!($ret) {
            let read = match $tensor.data() {
                Some(data) => Err(data),
                None => Ok(B::float_into_data($tensor.into_inner())),
            };
            async move {
                match read {
                    Ok(read) => read.await,
                    Err(data) => Ok(data),
                }
            }
        }
    };
    // The inner backend has no tape, so nothing has to run: a delivered tensor is returned unchanged.
    ($trait:ident view float_set_require_grad($x:ident: $a:tt, $arg:ident: $b:tt) -> $ret:tt) => {
        as_it_is! { $x.is_delivered() => $trait view float_set_require_grad($x: $a, $arg: $b) -> $ret }
    };
    // Burn calls this for each parameter in `valid()`.
    ($trait:ident $work:ident float_is_require_grad($x:ident: $a:tt) -> $ret:tt) => {
        #[inline]
        fn float_is_require_grad($x: kind_type!($a)) -> kind_type!($ret) {
            if $x.is_delivered() {
                return false;
            }
            managed!($trait $work float_is_require_grad($x: $a) -> $ret);
            plain!($ret B::float_is_require_grad(inner!($a $x)))
        }
    };
    ($trait:ident view float_detach($x:ident: $a:tt) -> $ret:tt) => {
        as_it_is! { $x.is_delivered() => $trait view float_detach($x: $a) -> $ret }
    };
    ($trait:ident view float_transpose($x:ident: $a:tt) -> $ret:tt) => {
        on_use! { $trait view float_transpose($x: $a) -> $ret, same if false, promised => {
            let last = promised.shape.num_dims() - 1;
            promised.permute(|dims| dims.swap(last - 1, last))
        } }
    };
    ($trait:ident view float_swap_dims($x:ident: $a:tt, $first:ident: $b:tt, $second:ident: $c:tt) -> $ret:tt) => {
        on_use! { $trait view float_swap_dims($x: $a, $first: $b, $second: $c) -> $ret, same if false, promised => {
            promised.permute(|dims| dims.swap($first, $second))
        } }
    };
    ($trait:ident view float_permute($x:ident: $a:tt, $axes:ident: $b:tt) -> $ret:tt) => {
        on_use! { $trait view float_permute($x: $a, $axes: $b) -> $ret, same if false, promised => {
            promised.permute(|dims| *dims = $axes.iter().map(|axis| dims[*axis]).collect())
        } }
    };
    ($trait:ident view float_reshape($x:ident: $a:tt, $shape:ident: $b:tt) -> $ret:tt) => {
        on_use! { $trait view float_reshape($x: $a, $shape: $b) -> $ret, same if $x.shape() == $shape, promised => promised.shape = $shape.clone() }
    };
    ($trait:ident view float_expand($x:ident: $a:tt, $shape:ident: $b:tt) -> $ret:tt) => {
        on_use! { $trait view float_expand($x: $a, $shape: $b) -> $ret, same if $x.shape() == $shape, promised => promised.shape = $shape.clone() }
    };
    ($trait:ident cheap float_cast($x:ident: $a:tt, $dtype:ident: $b:tt) -> $ret:tt) => {
        on_use! { $trait cheap float_cast($x: $a, $dtype: $b) -> $ret, same if {
            if let Some(cast) = $x.in_type($dtype.into()) {
                return cast;
            }
            $x.dtype() == $dtype.into()
        }, promised => promised.dtype = $dtype.into() }
    };
    ($trait:ident cheap float_to_device($x:ident: $a:tt, $device:ident: $b:tt) -> $ret:tt) => {
        on_use! { $trait cheap float_to_device($x: $a, $device: $b) -> $ret, same if $x.device() == *$device, promised => promised.device = $device.clone() }
    };
    // Only the shape of the weights is read, so delivered weights are not brought back: an empty tensor of their shape replaces them.
    ($trait:ident $work:ident embedding_backward($weights:ident: $a:tt, $grad:ident: $b:tt, $indices:ident: $c:tt) -> $ret:tt) => {
        #[inline]
        fn embedding_backward($weights: kind_type!($a), $grad: kind_type!($b), $indices: kind_type!($c)) -> kind_type!($ret) {
            let $weights = match $weights.is_delivered() {
                true => Handle::resident(B::float_empty($weights.shape(), &$weights.device(), $weights.dtype().into())),
                false => $weights,
            };
            managed!($trait $work embedding_backward($weights: $a, $grad: $b, $indices: $c) -> $ret);
            plain!($ret B::embedding_backward(inner!($a $weights), inner!($b $grad), inner!($c $indices)))
        }
    };
    ($trait:ident new float_ones($shape:ident: $a:tt, $device:ident: $b:tt, $dtype:ident: $c:tt) -> $ret:tt) => {
        fn float_ones($shape: kind_type!($a), $device: kind_type!($b), $dtype: kind_type!($c)) -> kind_type!($ret) {
            // Autodiff starts a backward pass with such a tensor.
            if $shape.num_elements() == 1 {
                context::warn_if_left_out();
            }
            managed!($trait new float_ones($shape: $a, $device: $b, $dtype: $c) -> $ret);
            plain!($ret B::float_ones($shape, $device, $dtype))
        }
    };
    ($trait:ident fixed float_random($shape:ident: $a:tt, $distribution:ident: $b:tt, $device:ident: $c:tt, $dtype:ident: $d:tt) -> $ret:tt) => {
        fn float_random($shape: kind_type!($a), $distribution: kind_type!($b), $device: kind_type!($c), $dtype: kind_type!($d)) -> kind_type!($ret) {
            if bits::is_worth(&$shape, $distribution) {
                return bits::draw::<B>($shape, $distribution, $device, $dtype);
            }
            managed!($trait fixed float_random($shape: $a, $distribution: $b, $device: $c, $dtype: $d) -> $ret);
            plain!($ret B::float_random($shape, $distribution, $device, $dtype))
        }
    };
    ($trait:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            managed!($trait $work $op($($arg: $kind),*) -> $ret);
            plain!($ret B::$op($(by_form!(inner $kind $arg)),*))
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Remat<B> {
            $(method! { $trait $work $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
