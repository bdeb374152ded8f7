//! Float tensors whose elements a function returns at each use: parameters in host memory.

use std::sync::Arc;

use burn_backend::tensor::{Device, FloatTensor};
use burn_backend::{Backend, DType, Shape, TensorData, TensorMetadata};
use burn_decorator::carried::carry;

use crate::error::RematError;
use crate::host::ahead::UploadPlace;
use crate::host::request::Request;
use crate::node::entry::Origin;
use crate::record::context;

/// A float tensor, of any backend with a [`Remat`](crate::Remat) in it, that holds no memory of the
/// device: `data` returns its elements whenever an operation uses it. They are uploaded for that
/// operation and dropped after it, in forward and in backward, in and outside of scopes and
/// budgets. Inside a scope or budget they are counted during the operation, otherwise while they
/// arrive.
///
/// A result computed from such tensors alone, by views, casts and operations on single elements, is
/// delivered too: what autodiff saves of it holds no memory either. A view or a cast is computed
/// only when it is used; another result is computed at once and stays until its first use. Later
/// uses compute it again. Each use has the same bits as the first if `data` always returns the
/// same.
///
/// A budget makes room for the elements and never evicts them; results of operations with other
/// tensors are recorded as usual. Reads to the host
/// ([`Tensor::into_data`](burn::tensor::Tensor::into_data)) take `data`'s elements without an
/// upload.
///
/// # Errors
///
/// [`RematError::NoRemat`] if `B` has no [`Remat`](crate::Remat) in it.
///
/// # Panics
///
/// A use panics if `data` returns another shape or type, or panics itself; the next use tries
/// again.
///
/// # Cost
///
/// One node. Each use costs a call of `data` and an upload, on the thread that uses the tensor.
/// Elements that are [`shared`](burn_decorator::shared) are handed to the backend without a copy;
/// [`delivered_in_order`] uploads before the use.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
/// use burn_checkpoint::{Remat, delivered};
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
/// let (data, device) = (TensorData::from([[1.0f32, 2.0], [3.0, 4.0]]), Default::default());
/// let weight = delivered::<B>([2, 2].into(), DType::F32, &device, move || data.clone())?;
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

/// As [`delivered`], but when the tensor or a view of it is cast to a type for which `has` is true,
/// `data` is called for that type and the cast computes nothing: under autocast the elements are
/// sent and uploaded in the low type. They equal the result of the backend's cast.
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
    request::<B>(
        shape,
        dtype,
        device,
        Arc::new(Functions { has, data }),
        None,
    )
}

/// Where the elements of a tensor come from that is [`delivered_in_order`].
pub trait Delivery: Send + Sync + 'static {
    /// The elements, at a use of the tensor: in its own type, or in one that there [is](Self::has).
    fn data(&self, dtype: DType) -> TensorData;

    /// Whether a cast to this type computes nothing, as [`data`](Self::data) returns the elements
    /// in it. Called when the tensor, or a view of it, is cast.
    fn has(&self, _dtype: DType) -> bool {
        false
    }

    /// The elements that a use would get now, if they are in host memory. Called at the use of
    /// another tensor, and must not wait.
    fn at_hand(&self, dtype: DType) -> Option<TensorData>;
}

/// As [`delivered_in_types`], a tensor that is uploaded before its use, if the tensors of its
/// [`UploadOrder`](crate::UploadOrder) are used as in the step before: while an operation computes
/// with one, the upload of the next one begins, and the device holds that too. So it holds one
/// tensor of the order more than without, outside of budgets; under a budget nothing is uploaded
/// before its use.
///
/// `place` is that of the version before, if this tensor replaces one, as each update of a
/// parameter does: see [`upload_place`].
///
/// # Errors
///
/// As [`delivered`].
///
/// # Panics
///
/// As [`delivered`]. A panic of an upload before its use is caught, and the use tries again.
///
/// # Cost
///
/// As [`delivered`]. An upload takes data that is [`shared`](burn_decorator::shared) without a
/// copy. It begins on the stream of the thread that trains: what is copied on the host, and the
/// transfer as far as the backend lets it, goes on while the device computes.
///
/// ```
/// use burn::backend::Autodiff;
/// use burn::tensor::{DType, Tensor, TensorData, TensorPrimitive};
/// use burn_checkpoint::{Delivery, Remat, UploadOrder, delivered_in_order};
/// use burn_decorator::shared;
/// use burn_flex::Flex;
///
/// type B = Autodiff<Remat<Flex>>;
///
/// struct OnHost(TensorData);
///
/// impl Delivery for OnHost {
///     fn data(&self, _: DType) -> TensorData {
///         self.0.clone()
///     }
///
///     fn at_hand(&self, _: DType) -> Option<TensorData> {
///         Some(self.0.clone())
///     }
/// }
///
/// let order = UploadOrder::new();
/// let device = Default::default();
/// let weights = [1.0f32, 2.0].map(|element| {
///     let data = OnHost(shared(TensorData::from([[element, 0.0], [0.0, element]])));
///     let (place, shape) = (order.place(), [2, 2].into());
///     let weight = delivered_in_order::<B>(&place, shape, DType::F32, &device, data);
///     Tensor::<B, 2>::from_primitive(TensorPrimitive::Float(weight.expect("a `Remat`")))
/// });
/// let [first, second] = weights;
/// let product = first.matmul(second).into_data();
/// assert_eq!(product, TensorData::from([[2.0f32, 0.0], [0.0, 2.0]]));
/// ```
pub fn delivered_in_order<B: Backend>(
    place: &UploadPlace,
    shape: Shape,
    dtype: DType,
    device: &Device<B>,
    delivery: impl Delivery,
) -> Result<FloatTensor<B>, RematError> {
    request::<B>(
        shape,
        dtype,
        device,
        Arc::new(delivery),
        Some(place.clone()),
    )
}

/// Elements that functions return, of which none are known to be at hand.
struct Functions<H, D> {
    has: H,
    data: D,
}

impl<H, D> Delivery for Functions<H, D>
where
    H: Fn(DType) -> bool + Send + Sync + 'static,
    D: Fn(DType) -> TensorData + Send + Sync + 'static,
{
    fn data(&self, dtype: DType) -> TensorData {
        (self.data)(dtype)
    }

    fn has(&self, dtype: DType) -> bool {
        (self.has)(dtype)
    }

    fn at_hand(&self, _dtype: DType) -> Option<TensorData> {
        None
    }
}

fn request<B: Backend>(
    shape: Shape,
    dtype: DType,
    device: &Device<B>,
    delivery: Arc<dyn Delivery>,
    place: Option<UploadPlace>,
) -> Result<FloatTensor<B>, RematError> {
    let request = Request {
        shape,
        dtype,
        delivery,
        is_cast: false,
        place,
    };
    // Every decorator passes data on to the backend below it: `Remat` returns the requested tensor.
    let upload = || B::float_from_data(TensorData::from([0.0f32]), device);
    match carry(request, upload) {
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
/// One read of the shape, which reaches the tensor of [`Remat`](crate::Remat) through all
/// decorators.
pub fn is_delivered<B: Backend>(tensor: &FloatTensor<B>) -> bool {
    let nodes = context::collecting(|| drop(tensor.shape()));
    let mut origins = nodes.iter().map(|node| node.info().origin);
    origins.any(|origin| origin == Origin::Delivered)
}

/// The place of a tensor that is [`delivered_in_order`], for its next version; `None` for any other
/// tensor, also for a view or cast of such a one.
///
/// # Cost
///
/// As [`is_delivered`].
pub fn upload_place<B: Backend>(tensor: &FloatTensor<B>) -> Option<UploadPlace> {
    let nodes = context::collecting(|| drop(tensor.shape()));
    nodes.iter().find_map(|node| node.upload_place())
}
