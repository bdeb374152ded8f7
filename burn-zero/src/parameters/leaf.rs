//! Leaves of parameters: what the next version of one takes over, and how its value becomes a leaf.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{DType, Shape, TensorData};
use burn_backend::tensor::{Device, FloatTensor};
use burn_checkpoint::{
    Delivery, ParameterUnit, RematError, UploadOrder, UploadPlace, delivered_in_order,
    is_delivered, upload_place,
};
use burn_decorator::{shared, upload};

use crate::host::read;

/// What the leaf of a parameter's next version takes over from that of the version before: device,
/// memory, unit, and whether it is trained. It does not keep the leaf alive.
pub(crate) struct LeafPlace<B: Backend> {
    device: Device<B>,
    memory: LeafMemory,
    unit: ParameterUnit,
    is_trained: bool,
}

impl<B: AutodiffBackend> LeafPlace<B> {
    /// That of a leaf.
    pub(crate) fn of(leaf: &FloatTensor<B>) -> Self {
        Self {
            device: B::float_device(leaf),
            memory: LeafMemory::of::<B>(leaf),
            unit: ParameterUnit::of::<B>(leaf),
            is_trained: B::float_is_require_grad(leaf),
        }
    }

    /// In host memory, wherever the leaf is.
    pub(super) fn on_host(self) -> Self {
        match self.memory {
            LeafMemory::Device => self.alone_on_host(),
            LeafMemory::Host(_) => self,
        }
    }

    /// In host memory, before and after no other one.
    pub(super) fn alone_on_host(self) -> Self {
        let memory = LeafMemory::alone_on_host();
        Self { memory, ..self }
    }

    /// A new value of the parameter, as a leaf.
    pub(crate) fn leaf(&self, value: NewValue<B::InnerBackend>) -> FloatTensor<B> {
        self.put(value.into_tensor::<B>(&self.memory, &self.device))
    }

    pub(super) fn device(&self) -> &Device<B> {
        &self.device
    }

    /// A tensor of the parameter that is in its memory, as a leaf.
    pub(crate) fn put(&self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        let leaf = self.unit.put::<B>(tensor);
        if self.is_trained {
            B::float_set_require_grad(leaf, true)
        } else {
            leaf
        }
    }

    pub(super) fn into_unit(self) -> ParameterUnit {
        self.unit
    }
}

/// Where the elements of a leaf are between its uses.
pub(crate) enum LeafMemory {
    /// On the device.
    Device,
    /// In host memory, with its place in the order of uploads.
    Host(UploadPlace),
}

impl LeafMemory {
    fn of<B: Backend>(parameter: &FloatTensor<B>) -> Self {
        if is_on_host::<B>(parameter) {
            Self::Host(upload_place_of::<B>(parameter))
        } else {
            Self::Device
        }
    }

    /// Host memory, for a tensor that is before and after no other one.
    pub(crate) fn alone_on_host() -> Self {
        Self::Host(UploadOrder::new().place())
    }
}

/// The new value of a parameter.
pub(crate) enum NewValue<I: Backend> {
    /// In host memory.
    Host(TensorData),
    /// On the device.
    Device(FloatTensor<I>),
}

impl<I: Backend> NewValue<I> {
    /// In another shape.
    pub(crate) fn reshaped(self, shape: Shape) -> Self {
        match self {
            Self::Host(mut data) => {
                data.shape = shape;
                Self::Host(data)
            }
            Self::Device(value) => Self::Device(I::float_reshape(value, shape)),
        }
    }

    /// The value as a tensor in this memory.
    pub(crate) fn into_tensor<B>(self, memory: &LeafMemory, device: &Device<B>) -> FloatTensor<B>
    where
        B: AutodiffBackend<InnerBackend = I, Device = I::Device>,
    {
        match (self, memory) {
            (Self::Device(value), LeafMemory::Device) => B::from_inner(value),
            (Self::Host(data), LeafMemory::Device) => B::from_inner(upload::<I>(data, device)),
            (value, LeafMemory::Host(place)) => {
                let data = match value {
                    Self::Device(value) => read::<I>(value),
                    Self::Host(data) => data,
                };
                on_host::<B>(data, device, place)
                    .expect("`prepare` refuses a backend without `Remat`")
            }
        }
    }
}

/// A version of a parameter in host memory: never written, as each update makes a new one, so that
/// uploads share it.
struct OnHost(TensorData);

impl Delivery for OnHost {
    fn data(&self, _dtype: DType) -> TensorData {
        self.0.clone()
    }

    fn at_hand(&self, dtype: DType) -> Option<TensorData> {
        Some(self.data(dtype))
    }
}

/// A tensor whose elements are in host memory, and are uploaded whenever it is used: the new
/// version of the one at this place.
pub(super) fn on_host<B: Backend>(
    data: TensorData,
    device: &Device<B>,
    place: &UploadPlace,
) -> Result<FloatTensor<B>, RematError> {
    let (shape, dtype) = (data.shape.clone(), data.dtype);
    delivered_in_order::<B>(place, shape, dtype, device, OnHost(shared(data)))
}

/// The place of a parameter in the order of uploads, for its next version; of its own order if it
/// has none.
pub(super) fn upload_place_of<B: Backend>(parameter: &FloatTensor<B>) -> UploadPlace {
    upload_place::<B>(parameter).unwrap_or_else(|| UploadOrder::new().place())
}

/// Whether a parameter is in host memory.
pub(crate) fn is_on_host<B: Backend>(parameter: &FloatTensor<B>) -> bool {
    is_delivered::<B>(parameter)
}
