//! A backend that casts a tensor to a low type once.
#![deny(clippy::missing_trait_methods)]

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};

use burn_backend::{Backend, BackendTypes, DType, FloatDType, TensorMetadata};
use burn_decorator::types::*;
use burn_decorator::{kind_type, map_operand, map_result};

use crate::cast::is_low;

/// A backend that keeps the low copy of an f32 tensor, for weights that are used many times in a
/// step: `Autocast<Autodiff<CastCache<Cuda>>>`.
///
/// Put it *below* `Autodiff`. Every use of a weight then still has its own cast in the graph, with
/// its own gradient in f32, so no gradient is lost. Only the low copy is shared: the cast is
/// computed once, and backward keeps one copy. Sharing is safe because a tensor's value never
/// changes: an operation makes a new tensor. PyTorch's autocast caches the node of the graph
/// instead, which loses gradients when the first use is without them.
///
/// # Cost
///
/// One host allocation per operation. The low copy, half the bytes of its tensor, lives as long as
/// the tensor: two bytes per parameter, and per element of each f32 activation that is cast and
/// kept. It pays for recurrent cells and shared weights; `cargo bench --workspace --bench recast`
/// measures it.
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
    /// The tensor in the first low type it was cast to; shared by all clones.
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
    burn_decorator::forward_dtypes!(B);

    fn name(device: &Self::Device) -> String {
        format!("cast-cache<{}>", B::name(device))
    }
}

/// An operand as the inner backend takes it.
macro_rules! unwrap {
    (FloatRef $x:expr) => {
        &$x.tensor
    };
    ($kind:tt $x:expr) => {
        map_operand!($kind $x, CachedTensor::into_inner)
    };
}

/// One method.
macro_rules! method {
    // The same values: the parameter of a `valid()` model shares the low copy of the one that is
    // trained.
    (float_detach($arg:ident: $kind:tt) -> $ret:tt) => {
        fn float_detach(tensor: FloatTensor<Self>) -> FloatTensor<Self> {
            let CachedTensor { tensor, low } = tensor;
            let tensor = B::float_detach(tensor);
            CachedTensor { tensor, low }
        }
    };
    (float_set_require_grad($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn float_set_require_grad(tensor: FloatTensor<Self>, require: bool) -> FloatTensor<Self> {
            let CachedTensor { tensor, low } = tensor;
            let tensor = B::float_set_require_grad(tensor, require);
            CachedTensor { tensor, low }
        }
    };
    (float_cast($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        fn float_cast($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            cast::<B>($($arg),*)
        }
    };
    ($op:ident($($arg:ident: $kind:tt),*) -> $ret:tt) => {
        #[inline]
        fn $op($($arg: kind_type!($kind)),*) -> kind_type!($ret) {
            // The cache of a new tensor is empty.
            map_result!($ret B::$op($(unwrap!($kind $arg)),*), CachedTensor::new)
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

burn_decorator::every_ops!(implement);
