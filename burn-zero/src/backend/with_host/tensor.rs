//! The tensor: on the device, or in host memory.

use core::fmt;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorData, TensorMetadata};

/// A float tensor of [`WithHost`](super::WithHost).
#[derive(Clone, Debug)]
pub enum PlacedTensor<T, D> {
    /// Of the inner backend.
    Device(T),
    /// In host memory.
    Host(HostTensor<D>),
}

/// A tensor in host memory. Clones share its elements until one of them is changed.
#[derive(Clone)]
pub struct HostTensor<D> {
    pub(super) data: Arc<TensorData>,
    pub(super) shape: Shape,
    /// Where it goes when an operation needs it there.
    pub(super) device: D,
}

impl<T: TensorMetadata, D: Clone> PlacedTensor<T, D> {
    /// The tensor on its device.
    pub(crate) fn up<B>(self) -> T
    where
        B: Backend<Device = D, FloatTensorPrimitive = T>,
    {
        match self {
            Self::Device(tensor) => tensor,
            Self::Host(tensor) => {
                let device = tensor.device.clone();
                B::float_from_data(tensor.into_data(), &device)
            }
        }
    }

    /// The device, or where it goes.
    pub(super) fn device<B>(&self) -> D
    where
        B: Backend<Device = D, FloatTensorPrimitive = T>,
    {
        match self {
            Self::Device(tensor) => B::float_device(tensor),
            Self::Host(tensor) => tensor.device.clone(),
        }
    }

    /// For operations that ask a tensor something that none on the host has.
    pub(super) fn on_device(&self) -> Option<&T> {
        match self {
            Self::Device(tensor) => Some(tensor),
            Self::Host(_) => None,
        }
    }
}

impl<D> HostTensor<D> {
    pub(super) fn new(data: TensorData, device: D) -> Self {
        Self {
            shape: data.shape.clone(),
            data: Arc::new(data),
            device,
        }
    }

    /// Its elements. Copies them if other tensors share them.
    pub(super) fn into_data(self) -> TensorData {
        let mut data = Arc::unwrap_or_clone(self.data);
        data.shape = self.shape;
        data
    }

    pub(super) fn reshape(self, shape: Shape) -> Self {
        Self { shape, ..self }
    }
}

impl<T: TensorMetadata, D> TensorMetadata for PlacedTensor<T, D>
where
    Self: Clone + Send + Sync + fmt::Debug,
{
    #[inline]
    fn dtype(&self) -> DType {
        match self {
            Self::Device(tensor) => tensor.dtype(),
            Self::Host(tensor) => tensor.data.dtype,
        }
    }

    #[inline]
    fn shape(&self) -> Shape {
        match self {
            Self::Device(tensor) => tensor.shape(),
            Self::Host(tensor) => tensor.shape.clone(),
        }
    }

    #[inline]
    fn rank(&self) -> usize {
        match self {
            Self::Device(tensor) => tensor.rank(),
            Self::Host(tensor) => tensor.shape.num_dims(),
        }
    }
}

impl<D: fmt::Debug> fmt::Debug for HostTensor<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostTensor")
            .field("dtype", &self.data.dtype)
            .field("shape", &self.shape)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

/// A tensor of the backend, on its device.
pub(super) fn up<B: Backend>(
    tensor: PlacedTensor<B::FloatTensorPrimitive, B::Device>,
) -> FloatTensor<B> {
    tensor.up::<B>()
}
