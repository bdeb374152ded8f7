//! Every operation, made from its row.
//!
//! Outside of scopes and budgets a method calls the inner backend and no more. Inside, a row whose
//! result can be computed again (every work class but `fixed` and `pass`) is recorded: its operands
//! are saved for a recipe, and its result becomes a node. So is a row whose operands are all
//! [delivered](crate::delivered()), anywhere. The result of a `fixed` row is a node without a
//! recipe.
#![deny(clippy::missing_trait_methods)]

use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_decorator::carried::take;
use burn_decorator::kind_type;
use burn_decorator::types::*;

use super::backend::Remat;
use super::bits;
use super::operands::{by_form, delivered, each, inner, load, room, save, show, sources};
use super::results::{handles, plain, value};
use crate::host::request::{Named, Request};
use crate::node::handle::Handle;
use crate::node::kind::{Float, Value};
use crate::node::recipe::{OnUse, Saved, recipe};
use crate::record::context;
use crate::record::op::OpInfo;
use crate::record::work::Work;
use crate::record::{self, Call, Promised, Results};
use crate::scope::units;

/// A result that is float or quantized.
fn tensor<B: Backend>(results: &mut Results<'_, B>) -> TensorPrimitive<Remat<B>> {
    if results.is_quantized() {
        TensorPrimitive::QFloat(results.expect())
    } else {
        TensorPrimitive::Float(results.expect())
    }
}

/// A view or a cast, whose shape, type and device are known before it runs: on a delivered tensor
/// it runs when its result is used.
#[inline(never)]
fn on_use<B: Backend>(
    op: &'static OpInfo,
    x: Handle<B, Float>,
    change: impl FnOnce(&mut Promised<B>),
    run: impl Fn(FloatTensor<B>) -> FloatTensor<B> + Send + Sync + 'static,
) -> Handle<B, Float> {
    let mut promised = Promised::like(&x);
    change(&mut promised);
    // Its elements can then be read without the device.
    let reshaped = op.reshapes.then(|| promised.shape.clone());
    let recipe = Arc::new(OnUse {
        op,
        input: x.save().value,
        reshaped,
        run: Arc::new(run),
    });
    Handle::Managed(record::derived(op, promised, recipe))
}

/// As [`on_use`], a view of another shape: the tensor itself if it has that shape.
fn in_shape<B: Backend>(
    op: &'static OpInfo,
    x: Handle<B, Float>,
    shape: Shape,
    run: fn(FloatTensor<B>, Shape) -> FloatTensor<B>,
) -> Handle<B, Float> {
    if x.shape() == shape {
        return x;
    }
    let of_result = shape.clone();
    let run = move |x| run(x, shape.clone());
    on_use(op, x, |y| y.shape = of_result, run)
}

/// Keeps the recording of an operation out of its method, so that the method stays short.
#[inline(never)]
fn apart<T>(recorded: impl FnOnce() -> T) -> T {
    recorded()
}

/// What the method of the operation `OP` does inside of a scope or budget.
macro_rules! managed {
    (pass $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {};
    // Its shape is known only when the future is done: not counted.
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureInt) => {};
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureFloat) => {};
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureBool) => {};
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        managed!(new $op($($arg: $kind),*) -> $ret);
    };
    (new $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        if context::records() {
            recorded!($op($($arg: $kind),*) -> $ret, call => {
                let mut room = record::Room::default();
                $(by_form!(room $kind $arg, room);)*
                call.begin_new(room);
            });
        }
    };
    ($work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        // Until the end of the method.
        let _reached = if units::exist() { reached!($($kind $arg),*) } else { None };
        if context::records() || OP.work.passes_delivery() && delivered!($($kind $arg),*) {
            recorded!($op($($arg: $kind),*) -> $ret, call => {
                $(by_form!(show $kind $arg, call);)*
                call.begin();
            });
        }
    };
}

/// Tells the unit of the first operand that is a parameter of one that it is used.
macro_rules! reached {
    ($($kind:tt $arg:expr),*) => {{
        #[allow(unused_mut, reason = "rows without tensors")]
        let mut unit = None;
        $(by_form!(each $kind $arg, x => if unit.is_none() { unit = x.unit() });)*
        unit.and_then(|unit| units::reach(&unit))
    }};
}

/// Records the operation `OP`, which begins by `$begin`.
macro_rules! recorded {
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt, $call:ident => $begin:expr) => {
        return apart(move || {
            let mut $call = Call::<B>::new(OP);
            $begin;
            let recipe = $call.needs_recipe().then(|| {
                let saved = ($(by_form!(save $kind $arg),)*);
                recipe::<B, _>(move |visit| {
                    let ($($arg,)*) = &saved;
                    #[allow(unused_variables, reason = "rows without tensors")]
                    if let Some(visit) = visit {
                        $(by_form!(sources $kind $arg, &mut *visit);)*
                        return Value::Absent;
                    }
                    value!($ret B::$op($(by_form!(load $kind $arg)),*))
                })
            });
            let mut value = match $call.retry(recipe.as_ref()) {
                Some(value) => value,
                None => value!($ret B::$op($(by_form!(inner $kind $arg)),*)),
            };
            let mut results = $call.results(&mut value, recipe);
            handles!($ret results)
        })
    };
}

/// What a method returns for a delivered tensor.
macro_rules! if_delivered {
    ($x:ident => $result:expr) => {
        if $x.is_delivered() {
            return $result;
        }
    };
}

/// As [`if_delivered`], of a view or a cast, which uses a parameter.
macro_rules! if_delivered_used {
    ($x:ident => $result:expr) => {
        if $x.is_delivered() {
            let _reached = if units::exist() { reached!(Float $x) } else { None };
            return $result;
        }
    };
}

/// What some methods do first, which may be all.
macro_rules! first {
    (float_from_data $data:ident $device:ident) => {
        if let Some(request) = take::<Request>() {
            return Handle::Managed(record::delivered(request, $device));
        }
        if let Some(named) = take::<Named>() {
            let value = Value::Float(B::float_from_data($data, $device));
            return Handle::Managed(record::parameter(named, value));
        }
    };
    (float_random $shape:ident $distribution:ident $device:ident $dtype:ident) => {
        if bits::is_worth(&$shape, $distribution) {
            return bits::draw::<B>($shape, $distribution, $device, $dtype);
        }
    };
    (float_device $x:ident) => {
        if context::records() {
            context::reads_device($x.read(context::step()));
        }
    };
    // Autodiff starts a backward pass with ones, mostly a single one.
    (float_ones $shape:ident $device:ident $dtype:ident) => {
        context::makes_ones($shape.num_elements());
    };
    // The inner backend has no tape, so nothing has to run: a delivered tensor is returned
    // unchanged.
    (float_set_require_grad $x:ident $required:ident) => { if_delivered!($x => $x) };
    (float_detach $x:ident) => { if_delivered!($x => $x) };
    // Burn calls this for each parameter in `valid()`.
    (float_is_require_grad $x:ident) => { if_delivered!($x => false) };
    // Only the shape of the weights is read, so delivered weights are not brought back: an empty
    // tensor of their shape replaces them.
    (embedding_backward $weights:ident $gradient:ident $indices:ident) => {
        let $weights = if $weights.is_delivered() {
            let (shape, device) = ($weights.shape(), $weights.device());
            Handle::resident(B::float_empty(shape, &device, $weights.dtype().into()))
        } else {
            $weights
        };
    };
    (float_transpose $x:ident) => {
        if_delivered_used!($x => {
            let last = $x.rank() - 1;
            let swap = |y: &mut Promised<B>| y.permute(|dims| dims.swap(last - 1, last));
            on_use(OP, $x, swap, B::float_transpose)
        })
    };
    (float_swap_dims $x:ident $a:ident $b:ident) => {
        if_delivered_used!($x => {
            let swap = |y: &mut Promised<B>| y.permute(|dims| dims.swap($a, $b));
            on_use(OP, $x, swap, move |x| B::float_swap_dims(x, $a, $b))
        })
    };
    (float_permute $x:ident $axes:ident) => {
        if_delivered_used!($x => {
            let axes = $axes.to_vec();
            let order = |dims: &mut Vec<usize>| *dims = $axes.iter().map(|axis| dims[*axis]).collect();
            on_use(OP, $x, |y| y.permute(order), move |x| B::float_permute(x, &axes))
        })
    };
    (float_reshape $x:ident $shape:ident) => { if_delivered_used!($x => in_shape(OP, $x, $shape, B::float_reshape)) };
    (float_expand $x:ident $shape:ident) => { if_delivered_used!($x => in_shape(OP, $x, $shape, B::float_expand)) };
    (float_cast $x:ident $dtype:ident) => {
        if_delivered_used!($x => {
            let dtype = $dtype.into();
            match $x.in_type(dtype) {
                Some(cast) => cast,
                None if $x.dtype() == dtype => $x,
                None => on_use(OP, $x, |y| y.dtype = dtype, move |x| B::float_cast(x, $dtype)),
            }
        })
    };
    (float_to_device $x:ident $device:ident) => {
        if !$x.is_delivered()
            && let Some(named) = take::<Named>()
        {
            let value = Value::Float(B::float_to_device($x.into_inner(), $device));
            return Handle::Managed(record::parameter(named, value));
        }
        if units::exist() && $x.device() == *$device && $x.unit().is_some() {
            return $x;
        }
        if_delivered!($x => {
            let device = $device.clone();
            if $x.device() == device {
                return $x;
            }
            let change = |y: &mut Promised<B>| y.device = $device.clone();
            on_use(OP, $x, change, move |x| B::float_to_device(x, &device))
        })
    };
    // An update that is undone selects the version of a parameter from before it: what is selected
    // is a version of it, too.
    (float_mask_where $x:ident $mask:ident $value:ident) => {
        if units::exist()
            && let Some(named) = units::version_of_both(&$x, &$value)
        {
            let value = B::float_mask_where($x.into_inner(), $mask.into_inner(), $value.into_inner());
            return Handle::Managed(record::parameter(named, Value::Float(value)));
        }
    };
    ($($other:ident)*) => {};
}

/// One method.
macro_rules! method {
    // The device is known without the storage.
    ($trait:ident pass $op:ident($tensor:ident: $kind:tt) -> Device) => {
        #[inline]
        fn $op($tensor: kind_type!($kind)) -> kind_type!(Device) {
            first!($op $tensor);
            $tensor.device()
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
    ($trait:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            #[allow(dead_code, reason = "rows that are passed on")]
            const OP: &OpInfo = &OpInfo::new(stringify!($op), Work::of(stringify!($work)), stringify!($trait));
            first!($op $($arg)*);
            managed!($work $op($($arg: $kind),*) -> $ret);
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
