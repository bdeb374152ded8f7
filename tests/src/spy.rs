//! A decorator from the same table that records the operations of a backend.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::marker::PhantomData;

use burn_backend::{Backend, BackendTypes, DType, DTypeUsage, DTypeUsageSet, TensorMetadata};
use burn_decorator::kind_type;
use burn_decorator::types::*;

/// A backend that records the operations that were called, and panics if one gets float operands of
/// different types. Fusion panics too; CubeCL alone does not.
///
/// With `LOW = false` it reports that it can only store f16 and bf16.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spy<B, const LOW: bool = true>(PhantomData<B>);

thread_local! {
    static CALLED: RefCell<BTreeSet<(&'static str, String)>> = const { RefCell::new(BTreeSet::new()) };
}

/// The operations called on this thread since the last call of this function, each with the type of
/// its float operands (empty where it has none).
pub fn take_calls() -> BTreeSet<(&'static str, String)> {
    CALLED.take()
}

impl<B: Backend, const LOW: bool> BackendTypes for Spy<B, LOW> {
    burn_decorator::forward_types!(B, float tensor: B::FloatTensorPrimitive);
}

impl<B: Backend, const LOW: bool> Backend for Spy<B, LOW> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("spy<{}>", B::name(device))
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        match dtype {
            DType::F16 | DType::BF16 if !LOW => DTypeUsage::Storage.into(),
            _ => B::dtype_usage(device, dtype),
        }
    }
}

fn watch(op: &'static str, dtypes: &[DType]) {
    if let [first, rest @ ..] = dtypes {
        assert!(
            rest.iter().all(|dtype| dtype == first),
            "{op} got mixed operands: {dtypes:?}"
        );
    }
    let dtype = dtypes
        .first()
        .map_or_else(String::new, |dtype| dtype.name().to_owned());
    CALLED.with_borrow_mut(|called| called.insert((op, dtype)));
}

macro_rules! see {
    (Float $x:ident $dtypes:ident) => {
        $dtypes.extend([$x.dtype()])
    };
    (Follow $x:ident $dtypes:ident) => {
        $dtypes.extend([$x.dtype()])
    };
    (FloatOpt $x:ident $dtypes:ident) => {
        $dtypes.extend($x.iter().map(|x| x.dtype()))
    };
    (Floats $x:ident $dtypes:ident) => {
        $dtypes.extend($x.iter().map(|x| x.dtype()))
    };
    // The other operand may be quantized, and is then dequantized to f32.
    (Tensor $x:ident $dtypes:ident) => {
        if let TensorPrimitive::Float(x) = &$x {
            $dtypes.extend([x.dtype(), DType::F32])
        }
    };
    ($kind:tt $x:ident $dtypes:ident) => {};
}

macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend, const LOW: bool> $trait<Self> for Spy<B, LOW> {
            $(fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
                #[allow(unused_mut, reason = "rows without float operands")]
                let mut dtypes: Vec<DType> = Vec::new();
                $(see!($kind $arg dtypes);)*
                watch(stringify!($op), &dtypes);
                retype!($ret B, Self, B::$op($(retype!($kind Self, B, $arg)),*))
            })*
        }
    };
}

burn_decorator::every_ops!(implement);
