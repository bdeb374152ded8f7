//! Results, by kind: passed on as they are, as a value of a node, and as handles of nodes.

/// A result that is not managed.
macro_rules! plain {
    (Float $y:expr) => { Handle::resident($y) };
    (Int $y:expr) => { Handle::resident($y) };
    (Bool $y:expr) => { Handle::resident($y) };
    (Quant $y:expr) => { Handle::resident($y) };
    (FloatOpt $y:expr) => { $y.map(Handle::resident) };
    (FutureInt $y:expr) => { plain!(future $y) };
    (FutureFloat $y:expr) => { plain!(future $y) };
    (FutureBool $y:expr) => { plain!(future $y) };
    (future $y:expr) => {{
        let y = $y;
        async move { Handle::resident(y.await) }
    }};
    (Tensor $y:expr) => {
        match $y {
            TensorPrimitive::Float(y) => TensorPrimitive::Float(Handle::resident(y)),
            TensorPrimitive::QFloat(y) => TensorPrimitive::QFloat(Handle::resident(y)),
        }
    };
    (($a:tt, $b:tt) $y:expr) => {{
        let (a, b) = $y;
        (plain!($a a), plain!($b b))
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr) => {{
        let y = $y;
        $name { $($field: plain!($kind y.$field)),+ }
    }};
    ($kind:tt $y:expr) => { $y };
}

/// The value of a node.
macro_rules! value {
    (Float $y:expr) => { Value::Float($y) };
    (Int $y:expr) => { Value::Int($y) };
    (Bool $y:expr) => { Value::Bool($y) };
    (Quant $y:expr) => { Value::Quant(Box::new($y)) };
    (FloatOpt $y:expr) => { $y.map_or(Value::Absent, Value::Float) };
    (Tensor $y:expr) => {
        match $y {
            TensorPrimitive::Float(y) => Value::Float(y),
            TensorPrimitive::QFloat(y) => Value::Quant(Box::new(y)),
        }
    };
    (($a:tt, $b:tt) $y:expr) => {{
        let (a, b) = $y;
        Value::Many(vec![value!($a a), value!($b b)])
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr) => {{
        let y = $y;
        Value::Many(vec![$(value!($kind y.$field)),+])
    }};
}

/// Handles of nodes.
macro_rules! handles {
    (FloatOpt $results:ident) => { $results.next() };
    (Tensor $results:ident) => { tensor(&mut $results) };
    (($a:tt, $b:tt) $results:ident) => { (handles!($a $results), handles!($b $results)) };
    ({$name:ident $($field:ident: $kind:tt),+} $results:ident) => {
        $name { $($field: handles!($kind $results)),+ }
    };
    ($handle:ident $results:ident) => { $results.expect() };
}

pub(super) use {handles, plain, value};
