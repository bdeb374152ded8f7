//! Float tensors whose elements a function returns at each use: parameters in host memory.

use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, Shape, TensorData, TensorMetadata};
use burn_decorator::cell::with_value;

use crate::context;
use crate::entry::Origin;
use crate::error::RematError;
use crate::request::{REQUEST, Request};

/// A float tensor, of any backend with a [`Remat`](crate::Remat) in it, that holds no memory of the device: `data` returns its elements
/// whenever an operation uses it. They are uploaded for that operation and dropped after it, in forward and in backward, in and outside
/// of scopes and budgets. Inside a scope or budget they are counted during the operation, otherwise while they arrive.
///
/// A result computed from such tensors alone, by views, casts and operations on single elements, is delivered too: what autodiff saves
/// of it holds no memory either. A view or a cast is computed only when it is used; another result is computed at once and stays until
/// its first use. Later uses compute it again. Each use has the same bits as the first if `data` always returns the same.
///
/// A budget makes room for the elements and never evicts them; results of operations with other tensors are recorded as usual.
/// Reads to the host ([`Tensor::into_data`](burn::tensor::Tensor::into_data)) take `data`'s elements without an upload.
///
/// # Errors
///
/// [`RematError::NoRemat`] if `B` has no [`Remat`](crate::Remat) in it.
///
/// # Panics
///
/// A use panics if `data` returns another shape or type, or panics itself; the next use tries again.
///
/// # Cost
///
/// One node. Each use costs a call of `data` and an upload, on the thread that uses the tensor.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
/// use burn_checkpoint::{Remat, delivered};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
/// let weight = TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]);
/// let weight = delivered::<B>([2, 2].into(), DType::F32, &Default::default(), move || weight.clone())?;
/// let weight = Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(weight)).require_grad();
/// let loss = weight.clone().transpose().matmul(weight.clone()).sum();
/// assert!(weight.grad(&loss.backward()).is_some());
/// # Ok::<(), burn_checkpoint::RematError>(())
/// ```
pub fn delivered<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &Device<B>,
    data: impl Fn() -> TensorData + Send + Sync + 'static,
) -> Result<FloatTensor<B>, RematError> {
    delivered_in_types::<B>(shape, dtype, device, |_| false, move |_| data())
}

/// As [`delivered`], but when the tensor or a view of it is cast to a type for which `has` is true, `data` is called for that type and the
/// cast computes nothing: under autocast the elements are sent and uploaded in the low type. They equal the result of the backend's cast.
///
/// # Errors
///
/// As [`delivered`].
///
/// # Panics
///
/// As [`delivered`].
pub fn delivered_in_types<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &Device<B>,
    has: impl Fn(DType) -> bool + Send + Sync + 'static,
    data: impl Fn(DType) -> TensorData + Send + Sync + 'static,
) -> Result<FloatTensor<B>, RematError> {
    let request = Request {
        shape,
        dtype,
        data: Arc::new(data),
        has: Some(Arc::new(has)),
    };
    // Every decorator passes data on to the backend below it: `Remat` returns the requested tensor.
    let upload = || B::float_from_data(TensorData::from([0.0f32]), device);
    match with_value(&REQUEST, request, upload) {
        (tensor, None) => Ok(tensor),
        (_, Some(_)) => Err(RematError::NoRemat {
            backend: B::name(device),
        }),
    }
}

/// Whether a float tensor is [`delivered`] at each use, or a view or cast of such a tensor.
///
/// # Cost
///
/// One read of the shape, which reaches the tensor of [`Remat`](crate::Remat) through all decorators.
pub fn is_delivered<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    let nodes = context::collecting(|| drop(tensor.shape()));
    let mut origins = nodes.iter().map(|node| node.info().origin);
    origins.any(|origin| origin == Origin::Delivered)
}
