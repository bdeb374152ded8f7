//! Operands and results of a decorator whose float tensors are not those of the inner backend.

/// An operand for the inner backend: a function converts its float tensors, the rest stays as it
/// is.
///
/// `FloatRef` stays as it is too, because the function takes tensors by value: the decorator
/// converts references itself.
///
/// ```
/// use burn_decorator::map_operand;
///
/// assert_eq!(map_operand!(Float 1, |x| x + 1), 2);
/// let floats: Vec<i32> = map_operand!(Floats vec![1, 2], |x| x + 1);
/// assert_eq!(floats, [2, 3]);
/// assert_eq!(map_operand!(Int 1, |x: i32| x + 1), 1);
/// ```
#[macro_export]
macro_rules! map_operand {
    (Float $x:expr, $f:expr) => {
        ($f)($x)
    };
    (Follow $x:expr, $f:expr) => {
        ($f)($x)
    };
    (FloatOpt $x:expr, $f:expr) => {
        $x.map($f)
    };
    (Floats $x:expr, $f:expr) => {
        $x.into_iter().map($f).collect()
    };
    (Tensor $x:expr, $f:expr) => {
        match $x {
            $crate::types::TensorPrimitive::Float(x) => {
                $crate::types::TensorPrimitive::Float(($f)(x))
            }
            $crate::types::TensorPrimitive::QFloat(x) => $crate::types::TensorPrimitive::QFloat(x),
        }
    };
    (QuantParams $x:expr, $f:expr) => {
        $crate::map_qparams!($x, $f)
    };
    (Transaction $x:expr, $f:expr) => {
        $crate::types::TransactionPrimitive::new(
            $x.read_floats.into_iter().map($f).collect(),
            $x.read_qfloats,
            $x.read_ints,
            $x.read_bools,
        )
    };
    ($kind:tt $x:expr, $f:expr) => {
        $x
    };
}

/// A result of the decorator: a function converts its float tensors, the rest stays as it is.
///
/// ```
/// use burn_decorator::map_result;
///
/// assert_eq!(map_result!((Float, Int) (1, 1), |y| y + 1), (2, 1));
/// ```
#[macro_export]
macro_rules! map_result {
    (Float $y:expr, $f:expr) => { ($f)($y) };
    (FloatOpt $y:expr, $f:expr) => { $y.map($f) };
    (Tensor $y:expr, $f:expr) => { $crate::map_operand!(Tensor $y, $f) };
    (($a:tt, $b:tt) $y:expr, $f:expr) => {{
        let (a, b) = $y;
        ($crate::map_result!($a a, $f), $crate::map_result!($b b, $f))
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr, $f:expr) => {{
        let y = $y;
        $crate::types::$name { $($field: $crate::map_result!($kind y.$field, $f)),+ }
    }};
    ($kind:tt $y:expr, $f:expr) => { $y };
}
