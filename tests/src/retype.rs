//! For a decorator whose tensors are those of the inner backend: operands and results that name the
//! backend in their type.

macro_rules! retype {
    (Tensor $from:ty, $to:ty, $x:expr) => {
        match $x {
            TensorPrimitive::<$from>::Float(x) => TensorPrimitive::<$to>::Float(x),
            TensorPrimitive::<$from>::QFloat(x) => TensorPrimitive::<$to>::QFloat(x),
        }
    };
    (Transaction $from:ty, $to:ty, $x:expr) => {
        TransactionPrimitive::new($x.read_floats, $x.read_qfloats, $x.read_ints, $x.read_bools)
    };
    (QuantParams $from:ty, $to:ty, $x:expr) => { QuantizationParametersPrimitive { scales: $x.scales } };
    ({$name:ident $($field:ident: $kind:tt),+} $from:ty, $to:ty, $x:expr) => {{
        let x = $x;
        $name { $($field: x.$field),+ }
    }};
    ($kind:tt $from:ty, $to:ty, $x:expr) => { $x };
}
