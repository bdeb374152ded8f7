//! Operands, by kind: as the inner backend takes them, as a call sees them, and as a recipe keeps and loads them.

use burn_backend::Backend;

use crate::handle::Handle;
use crate::kind::Kind;

/// Calls a macro with the form of an operand, `Opt` or `List`, where its kind does not matter.
macro_rules! by_form {
    ($macro:ident FloatOpt $($rest:tt)*) => { $macro!(Opt $($rest)*) };
    ($macro:ident BoolOpt $($rest:tt)*) => { $macro!(Opt $($rest)*) };
    ($macro:ident Floats $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Ints $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Bools $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident Quants $($rest:tt)*) => { $macro!(List $($rest)*) };
    ($macro:ident $($rest:tt)*) => { $macro!($($rest)*) };
}

/// An operand as the inner backend takes it: brought back if it is evicted.
macro_rules! inner {
    (FloatRef $x:expr) => { &$x.to_inner() };
    (IntRef $x:expr) => { &$x.to_inner() };
    (BoolRef $x:expr) => { &$x.to_inner() };
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
    (Fill $x:expr) => { $x };
    (Device $x:expr) => { $x };
    (DeviceRef $x:expr) => { $x };
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
        save_tensor::<B>(&$x)
    };
    (QuantParams $x:expr) => {
        burn_decorator::list_qparams!($x, Handle::save)
    };
    (Fill $x:expr) => {
        $x
    };
    (DeviceRef $x:expr) => {
        $x.clone()
    };
    ([&QuantScheme] $x:expr) => {
        *$x
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

/// Shows an argument to a call: a tensor, or one that a result's size depends on.
macro_rules! show {
    (Opt $x:expr, $see:expr) => {
        $x.iter().for_each(|x| x.show($see))
    };
    (List $x:expr, $see:expr) => {
        $x.iter().for_each(|x| x.show($see))
    };
    (Tensor $x:expr, $see:expr) => {
        match &$x {
            TensorPrimitive::Float(x) => x.show($see),
            TensorPrimitive::QFloat(x) => x.show($see),
        }
    };
    (QuantParams $x:expr, $see:expr) => {
        burn_decorator::list_qparams!(&$x, |x| x)
            .iter()
            .for_each(|x| x.show($see))
    };
    (DeviceRef $x:expr, $see:expr) => {
        ($see)(Argument::To($x))
    };
    ([usize] $x:expr, $see:expr) => {
        ($see)(Argument::Number($x))
    };
    ([FloatDType] $x:expr, $see:expr) => {
        ($see)(Argument::Type($x.into()))
    };
    ([IntDType] $x:expr, $see:expr) => {
        ($see)(Argument::Type($x.into()))
    };
    ([BoolDType] $x:expr, $see:expr) => {
        ($see)(Argument::Type($x.into()))
    };
    // No result's size depends on a scalar, and an optimizer passes another one each step.
    ([Scalar] $x:expr, $see:expr) => {};
    ([$plain:ty] $x:expr, $see:expr) => {
        ($see)(Argument::Plain(&$x))
    };
    // A slice is a view, for which no room is made, and an assignment to one has the size of its operand.
    ({Slice} $x:expr, $see:expr) => {};
    ({$element:ty} $x:expr, $see:expr) => {
        ($see)(Argument::Plain(&$x))
    };
    (Fill $x:expr, $see:expr) => {};
    ($handle:ident $x:expr, $see:expr) => {
        $x.show($see)
    };
}

/// Shows the nodes that a recipe kept.
macro_rules! sources {
    (Opt $x:expr, $visit:expr) => {
        $x.iter().for_each(|x| x.sources($visit))
    };
    (List $x:expr, $visit:expr) => {
        $x.iter().for_each(|x| x.sources($visit))
    };
    (QuantParams $x:expr, $visit:expr) => {
        $x.iter().for_each(|x| x.sources($visit))
    };
    (DeviceRef $x:expr, $visit:expr) => {{
        let _ = $x;
    }};
    ([$plain:ty] $x:expr, $visit:expr) => {{
        let _ = $x;
    }};
    ({$element:ty} $x:expr, $visit:expr) => {{
        let _ = $x;
    }};
    (Fill $x:expr, $visit:expr) => {{
        let _ = $x;
    }};
    ($handle:ident $x:expr, $visit:expr) => {
        $x.sources($visit)
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
            Value::Quant(x) => TensorPrimitive::QFloat(x),
            x => TensorPrimitive::Float(x.float()),
        }
    };
    (QuantParams $x:expr) => {
        burn_decorator::collect_qparams!($x.iter().map(Saved::load))
    };
    (Fill $x:expr) => {
        *$x
    };
    (DeviceRef $x:expr) => {
        $x
    };
    ([&QuantScheme] $x:expr) => {
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
    (DeviceRef $x:expr, $room:expr) => {
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
    ([FloatDType] $x:expr, $room:expr) => {
        $room.dtype($x)
    };
    ([IntDType] $x:expr, $room:expr) => {
        $room.dtype($x)
    };
    ([BoolDType] $x:expr, $room:expr) => {
        $room.dtype($x)
    };
    ($kind:tt $x:expr, $room:expr) => {};
}

/// Whether there are tensors among the operands, and all of them are delivered.
macro_rules! delivered {
    ($($kind:tt $arg:expr),*) => {{
        #[allow(unused_mut, reason = "rows without tensors")]
        let mut delivered = Delivered::default();
        $(by_form!(see $kind $arg, delivered);)*
        delivered.all()
    }};
}

macro_rules! see {
    (Opt $x:expr, $delivered:ident) => {
        $x.iter().for_each(|x| $delivered.see(x))
    };
    (List $x:expr, $delivered:ident) => {
        $x.iter().for_each(|x| $delivered.see(x))
    };
    (Tensor $x:expr, $delivered:ident) => {
        match &$x {
            TensorPrimitive::Float(x) => $delivered.see(x),
            TensorPrimitive::QFloat(_) => $delivered.see_other(),
        }
    };
    (QuantParams $x:expr, $delivered:ident) => {
        $delivered.see_other()
    };
    (Transaction $x:expr, $delivered:ident) => {
        $delivered.see_other()
    };
    (Fill $x:expr, $delivered:ident) => {};
    (Device $x:expr, $delivered:ident) => {};
    (DeviceRef $x:expr, $delivered:ident) => {};
    ([$plain:ty] $x:expr, $delivered:ident) => {};
    ({$element:ty} $x:expr, $delivered:ident) => {};
    ($handle:ident $x:expr, $delivered:ident) => {
        $delivered.see(&$x)
    };
}

/// Whether delivered and other tensors were seen among the operands.
#[derive(Default)]
pub(super) struct Delivered {
    any: bool,
    others: bool,
}

impl Delivered {
    #[inline]
    pub fn see<B: Backend, K: Kind<B>>(&mut self, operand: &Handle<B, K>) {
        match operand.is_delivered() {
            true => self.any = true,
            false => self.others = true,
        }
    }

    #[inline]
    pub fn see_other(&mut self) {
        self.others = true;
    }

    #[inline]
    pub fn all(self) -> bool {
        self.any && !self.others
    }
}

pub(super) use {by_form, delivered, inner, load, room, save, see, show, sources};
