//! A backend that casts a tensor to a low type once.
#![deny(clippy::missing_trait_methods)]

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use burn_backend::{Backend, BackendTypes, DType, DTypeUsageSet, FloatDType, TensorMetadata};
use burn_decorator::kind_type;
use burn_decorator::types::*;

use crate::cast::is_low;

/// A backend that remembers what an f32 tensor is in a low type, for weights that are used many times in a step:
/// `Autocast<Autodiff<CastCache<Cuda>>>`.
///
/// Put it *below* `Autodiff`. Every use of a weight is then still a cast of its own in the graph, with its own gradient in
/// f32, so no gradient can be lost, whatever was used first, with or without gradients, in however many losses; only the
/// computation behind the casts is shared, and so is the memory of what backward keeps. That is safe because it is a
/// function of the tensor's value, and a tensor's value never changes: an operation makes a new tensor. PyTorch's autocast
/// caches the node of the graph instead, which loses gradients when the first use is without them.
///
/// # Cost
///
/// An allocation an operation. The low copy, half the bytes of its tensor, lives as long as the tensor: two bytes a
/// parameter, and as many an element of each f32 activation that is cast and kept. Worth it for recurrent cells and shared weights; `cargo bench -p burn-amp --bench recast` measures it.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::Tensor;
/// use burn_amp::{Autocast, CastCache};
/// use burn_flex::Flex;
///
/// type B = Autocast<Autodiff<CastCache<Flex>>>;
///
/// let w = Tensor::<B, 2>::ones([2, 2], &Default::default()).require_grad();
/// let x = w.clone().matmul(w.clone()).matmul(w.clone()); // w is cast once
/// assert!(w.grad(&x.sum().backward()).is_some());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct CastCache<B>(PhantomData<B>);

/// A float tensor of [`CastCache`].
#[derive(Clone, Debug)]
pub struct CachedTensor<T> {
    tensor: T,
    /// What the tensor is in the first low type it was cast to; shared by all clones.
    low: Arc<OnceLock<(FloatDType, T)>>,
}

impl<T> CachedTensor<T> {
    /// A tensor that has not been cast yet.
    pub fn new(tensor: T) -> Self {
        let low = Arc::default();
        Self { tensor, low }
    }

    /// The inner backend's tensor.
    pub fn into_inner(self) -> T {
        self.tensor
    }
}

impl<T: TensorMetadata> TensorMetadata for CachedTensor<T> {
    burn_decorator::forward_metadata!(tensor);
}

impl<B: Backend> BackendTypes for CastCache<B> {
    burn_decorator::forward_types!(B, float tensor: CachedTensor<B::FloatTensorPrimitive>);
}

/// The cast itself, from the cache if the source is f32 and the target low.
fn cast<B: Backend>(
    tensor: FloatTensor<CastCache<B>>,
    dtype: FloatDType,
) -> FloatTensor<CastCache<B>> {
    if tensor.dtype() != DType::F32 || !is_low(dtype) {
        return CachedTensor::new(B::float_cast(tensor.tensor, dtype));
    }
    let compute = || (dtype, B::float_cast(tensor.tensor.clone(), dtype));
    let (cached, low) = tensor.low.get_or_init(compute);
    CachedTensor::new(if *cached == dtype {
        low.clone()
    } else {
        B::float_cast(tensor.tensor, dtype)
    })
}

impl<B: Backend> Backend for CastCache<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        format!("cast-cache<{}>", B::name(device))
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
}

/// An operand as the inner backend takes it.
macro_rules! unwrap {
    (Float $x:expr) => {
        $x.tensor
    };
    (Follow $x:expr) => {
        $x.tensor
    };
    (FloatRef $x:expr) => {
        &$x.tensor
    };
    (FloatOpt $x:expr) => {
        $x.map(CachedTensor::into_inner)
    };
    (Floats $x:expr) => {
        $x.into_iter().map(CachedTensor::into_inner).collect()
    };
    (Tensor $x:expr) => {
        match $x {
            TensorPrimitive::Float(x) => TensorPrimitive::Float(x.tensor),
            TensorPrimitive::QFloat(x) => TensorPrimitive::QFloat(x),
        }
    };
    (QuantParams $x:expr) => {
        QuantizationParametersPrimitive {
            scales: $x.scales.tensor,
        }
    };
    (Transaction $x:expr) => {
        TransactionPrimitive::new(
            unwrap!(Floats $x.read_floats),
            $x.read_qfloats,
            $x.read_ints,
            $x.read_bools,
        )
    };
    ($kind:tt $x:expr) => {
        $x
    };
}

/// A result as this backend gives it: a new tensor, which nothing is remembered of.
macro_rules! wrap {
    (Float $y:expr) => {
        CachedTensor::new($y)
    };
    (FloatOpt $y:expr) => {
        $y.map(CachedTensor::new)
    };
    (Tensor $y:expr) => {
        match $y {
            TensorPrimitive::Float(y) => TensorPrimitive::Float(CachedTensor::new(y)),
            TensorPrimitive::QFloat(y) => TensorPrimitive::QFloat(y),
        }
    };
    (($a:tt, $b:tt) $y:expr) => {{
        let (a, b) = $y;
        (wrap!($a a), wrap!($b b))
    }};
    ({$name:ident $($field:ident: $kind:tt),+} $y:expr) => {{
        let y = $y;
        $name { $($field: wrap!($kind y.$field)),+ }
    }};
    ($kind:tt $y:expr) => {
        $y
    };
}

/// One method.
macro_rules! method {
    (float_cast($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn float_cast($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            cast::<B>($($arg),*)
        }
    };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            wrap!($ret B::$op($(unwrap!($kind $arg)),*))
        }
    };
}

/// One trait.
macro_rules! implement {
    ($trait:ident $($class:ident $work:ident $op:ident($($arg:ident: $kind:tt),*) -> $ret:tt $(= $why:literal)?;)*) => {
        impl<B: Backend> $trait<Self> for CastCache<B> {
            $(method! { $op($($arg: $kind),*) -> $ret })*
        }
    };
}

burn_decorator::float_ops!(implement);
burn_decorator::int_ops!(implement);
burn_decorator::bool_ops!(implement);
burn_decorator::quantized_ops!(implement);
burn_decorator::module_ops!(implement);
burn_decorator::activation_ops!(implement);
burn_decorator::transaction_ops!(implement);
