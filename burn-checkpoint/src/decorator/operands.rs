//! Operands, by kind: as the inner backend takes them, as a call sees them, and as a recipe keeps
//! and loads them.

/// Calls a macro with the form of an operand where its kind does not matter: `Opt` or `List` of
/// tensors, or a plain type.
macro_rules! by_form {
    ($macro:ident FloatOpt $($rest:tt)*) => { $macro!(Opt $($rest)*) };
    ($macro:ident BoolOpt $($rest:tt)*) => { $macro!(Opt $($rest)*) };
    ($macro:ident Floats $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Ints $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Bools $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Quants $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Fill $($rest:tt)*) => { $macro!([Scalar] $($rest)*) };
    ($macro:ident DeviceRef $($rest:tt)*) => { $macro!([&Device] $($rest)*) };
    ($macro:ident [FloatDType] $($rest:tt)*) => { $macro!([DType] $($rest)*) };
    ($macro:ident [IntDType] $($rest:tt)*) => { $macro!([DType] $($rest)*) };
    ($macro:ident [BoolDType] $($rest:tt)*) => { $macro!([DType] $($rest)*) };
    ($macro:ident $($rest:tt)*) => { $macro!($($rest)*) };
}

/// An operand as the inner backend takes it: brought back if it is evicted.
macro_rules! inner {
    (FloatRef $x:expr) => { &$x.to_inner() };
    (QuantRef $x:expr) => { &$x.to_inner() };
    (Opt $x:expr) => { $x.map(Handle::into_inner) };
    (List $x:expr) => { $x.into_iter().map(Handle::into_inner).collect() };
    (Tensor $x:expr) => {
        match $x {
            TensorPrimitive::Float(x) => TensorPrimitive::Float(x.into_inner()),
            TensorPrimitive::QFloat(x) => TensorPrimitive::QFloat(x.into_inner()),
        }
    };
    (QuantParams $x:expr) => {
        burn_decorator::map_operand!(QuantParams $x, Handle::into_inner)
    };
    (Transaction $x:expr) => {
        TransactionPrimitive::new(
            inner!(List $x.read_floats),
            inner!(List $x.read_qfloats),
            inner!(List $x.read_ints),
            inner!(List $x.read_bools),
        )
    };
    ($handle:ident $x:expr) => { $x.into_inner() };
    ($plain:tt $x:expr) => { $x };
}

/// An operand as a recipe keeps it.
macro_rules! save {
    (Opt $x:expr) => {
        $x.as_ref().map(Handle::save)
    };
    (List $x:expr) => {
        $x.iter().map(Handle::save).collect::<Vec<_>>()
    };
    (Tensor $x:expr) => {
        each!(Tensor $x, x => x.save().value)
    };
    (QuantParams $x:expr) => {
        burn_decorator::list_qparams!($x, Handle::save)
    };
    ([$plain:ty] $x:expr) => {
        $x.clone()
    };
    ({$element:ty} $x:expr) => {
        $x.to_vec()
    };
    ($handle:ident $x:expr) => {
        $x.save()
    };
}

/// Runs `$body` with each tensor `$var` of an operand.
macro_rules! each {
    (Opt $x:expr, $var:ident => $body:expr) => {
        $x.iter().for_each(|$var| $body)
    };
    (List $x:expr, $var:ident => $body:expr) => {
        $x.iter().for_each(|$var| $body)
    };
    (Tensor $x:expr, $var:ident => $body:expr) => {
        match &$x {
            TensorPrimitive::Float($var) => $body,
            TensorPrimitive::QFloat($var) => $body,
        }
    };
    (QuantParams $x:expr, $var:ident => $body:expr) => {
        each!(List burn_decorator::list_qparams!(&$x, |x| x), $var => $body)
    };
    ([$plain:ty] $x:expr, $var:ident => $body:expr) => {};
    ({$element:ty} $x:expr, $var:ident => $body:expr) => {};
    ($handle:ident $x:expr, $var:ident => $body:expr) => {{
        let $var = &$x;
        $body
    }};
}

/// Shows an argument to a call: a tensor, or one that a result's size depends on.
macro_rules! show {
    ([&Device] $x:expr, $call:expr) => {
        $call.see_device($x)
    };
    ([usize] $x:expr, $call:expr) => {
        $call.see_number($x)
    };
    ([DType] $x:expr, $call:expr) => {
        $call.see_type($x.into())
    };
    // No result's size depends on a scalar, and an optimizer passes another one each step.
    ([Scalar] $x:expr, $call:expr) => {};
    // A slice is a view, for which no room is made, and an assignment to one has the size of its
    // operand.
    ({Slice} $x:expr, $call:expr) => {};
    ($tensors:ident $x:expr, $call:expr) => {
        each!($tensors $x, x => x.show(&mut $call))
    };
    ($plain:tt $x:expr, $call:expr) => {
        $call.see_plain(&$x)
    };
}

/// Shows the nodes that a recipe kept.
macro_rules! sources {
    (Tensor $x:expr, $visit:expr) => {
        $x.sources($visit)
    };
    (QuantParams $x:expr, $visit:expr) => {
        each!(List $x, x => x.sources($visit))
    };
    ($kind:tt $x:expr, $visit:expr) => {
        each!($kind $x, x => x.sources($visit))
    };
}

/// What a recipe kept, as the inner backend takes it.
macro_rules! load {
    (Opt $x:expr) => {
        $x.as_ref().map(Saved::load)
    };
    (List $x:expr) => {
        $x.iter().map(Saved::load).collect()
    };
    (Tensor $x:expr) => {
        match $x.load() {
            Value::Quant(x) => TensorPrimitive::QFloat(*x),
            x => TensorPrimitive::Float(x.float()),
        }
    };
    (QuantParams $x:expr) => {
        burn_decorator::collect_qparams!($x.iter().map(Saved::load))
    };
    ([&$plain:ty] $x:expr) => {
        $x
    };
    ([$plain:ty] $x:expr) => {
        $x.clone()
    };
    ({$element:ty} $x:expr) => {
        $x
    };
    ($handle:ident $x:expr) => {
        $x.load()
    };
}

/// Adds what an argument determines of a new tensor's size.
macro_rules! room {
    ([&Device] $x:expr, $room:expr) => {
        $room.on($x)
    };
    ([Shape] $x:expr, $room:expr) => {
        $room.shape(&$x)
    };
    ([TensorData] $x:expr, $room:expr) => {
        $room.data(&$x)
    };
    ([Range<i64>] $x:expr, $room:expr) => {
        $room.range(&$x)
    };
    ([usize] $x:expr, $room:expr) => {
        $room.step($x)
    };
    ([DType] $x:expr, $room:expr) => {
        $room.dtype($x)
    };
    ($kind:tt $x:expr, $room:expr) => {};
}

/// Whether there are tensors among the operands, and all of them are delivered.
macro_rules! delivered {
    ($($kind:tt $arg:expr),*) => {{
        #[allow(unused_mut, reason = "rows without tensors")]
        let mut all = None;
        $(by_form!(each $kind $arg, x => all = Some(all != Some(false) && x.is_delivered()));)*
        all == Some(true)
    }};
}

pub(super) use {by_form, delivered, each, inner, load, room, save, show, sources};
