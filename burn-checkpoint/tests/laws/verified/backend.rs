//! The decorator that notes what really runs, below `Remat`.

use std::convert::identity;
use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, read_sync};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use super::NotedOperation;

/// A backend that notes each operation, what it ran on and what it gave, in
/// [`recorded`](super::recorded); else it is the inner one.
#[derive(Clone, Copy, Debug, Default)]
pub struct Verified<B>(PhantomData<B>);

impl<B: Backend> BackendTypes for Verified<B> {
    burn_decorator::forward_types!(B, float tensor: FloatTensor<B>);
}

impl<B: Backend> Backend for Verified<B> {
    burn_decorator::forward_device!(B);
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("verified<{}>", B::name(device))
    }
}

fn float<B: Backend>(tensor: &FloatTensor<B>) -> TensorData {
    read_sync(B::float_into_data(tensor.clone())).expect("a float tensor is read")
}

fn int<B: Backend>(tensor: &IntTensor<B>) -> TensorData {
    read_sync(B::int_into_data(tensor.clone())).expect("an int tensor is read")
}

fn bool<B: Backend>(tensor: &BoolTensor<B>) -> TensorData {
    read_sync(B::bool_into_data(tensor.clone())).expect("a bool tensor is read")
}

fn quantized<B: Backend>(tensor: &QuantizedTensor<B>) -> TensorData {
    read_sync(B::q_into_data(tensor.clone())).expect("a quantized tensor is read")
}

/// Gives the data of each tensor of an operand or a result, by kind, to a closure.
macro_rules! each {
    (Float $x:expr, $see:expr) => { $see(float::<B>(&$x)) };
    (Follow $x:expr, $see:expr) => { $see(float::<B>(&$x)) };
    (FloatOpt $x:expr, $see:expr) => { $x.iter().map(float::<B>).for_each($see) };
    (Floats $x:expr, $see:expr) => { $x.iter().map(float::<B>).for_each($see) };
    (Int $x:expr, $see:expr) => { $see(int::<B>(&$x)) };
    (Ints $x:expr, $see:expr) => { $x.iter().map(int::<B>).for_each($see) };
    (Bool $x:expr, $see:expr) => { $see(bool::<B>(&$x)) };
    (BoolOpt $x:expr, $see:expr) => { $x.iter().map(bool::<B>).for_each($see) };
    (Bools $x:expr, $see:expr) => { $x.iter().map(bool::<B>).for_each($see) };
    (Quant $x:expr, $see:expr) => { $see(quantized::<B>(&$x)) };
    (Quants $x:expr, $see:expr) => { $x.iter().map(quantized::<B>).for_each($see) };
    (QuantParams $x:expr, $see:expr) => { $see(float::<B>(&$x.scales)) };
    (Tensor $x:expr, $see:expr) => {
        match &$x {
            TensorPrimitive::Float(x) => $see(float::<B>(x)),
            TensorPrimitive::QFloat(x) => $see(quantized::<B>(x)),
        }
    };
    (($a:tt, $b:tt) $y:expr, $see:expr) => {{
        each!($a $y.0, $see);
        each!($b $y.1, $see);
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr, $see:expr) => {
        $(each!($kind $y.$field, $see);)+
    };
}

/// Notes an operand: the data of a tensor, what else decides about the result as text.
macro_rules! operand {
    ($call:ident [TensorData] $x:ident) => { $call.elements(&$x) };
    ($call:ident [$plain:ty] $x:ident) => { $call.plain(&$x) };
    ($call:ident {$element:ty} $x:ident) => { $call.plain(&$x) };
    ($call:ident Fill $x:ident) => { $call.plain(&$x) };
    ($call:ident DeviceRef $x:ident) => { $call.plain(&$x) };
    ($call:ident $kind:tt $x:ident) => { each!($kind $x, |data| $call.operand(&data)) };
}

macro_rules! method {
    // Nothing is computed, or it is known only when a future is done.
    (pass $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => { method!(@forward $op($($arg: $kind),*) -> $ret); };
    (fixed $op:ident($($arg:ident: $kind:tt),*) -> FutureInt) => { method!(@forward $op($($arg: $kind),*) -> FutureInt); };
    (@forward $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            map_result!($ret B::$op($(map_operand!($kind $arg, identity)),*), identity)
        }
    };
    ($work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            let mut noted = NotedOperation::begin(stringify!($op), stringify!($work));
            if let Some(call) = &mut noted {
                $(operand!(call $kind $arg);)*
            }
            let result = map_result!($ret B::$op($(map_operand!($kind $arg, identity)),*), identity);
            if let Some(mut call) = noted {
                each!($ret result, |data| call.result(&data));
                call.end();
            }
            result
        }
    };
}

macro_rules! implement {
    ($trait:ident $($cast:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for Verified<B> {
            $(method! { $work $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::every_ops!(implement);
