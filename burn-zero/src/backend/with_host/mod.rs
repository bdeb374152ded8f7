//! A backend that can leave a tensor in host memory.

mod ops;
#[cfg(test)]
mod tests;

use core::fmt;
use std::cell::Cell;
use std::marker::PhantomData;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{
    Backend, BackendTypes, DType, DTypeUsageSet, FloatDType, Shape, TensorData, TensorMetadata,
};
use rayon::prelude::*;

use crate::host::is_finite;

/// The backend `B`, some of whose float tensors are in host memory: gradients that left the device during backward and whose
/// optimizer is on the host. It is the inner backend of [`Sharded`](super::Sharded), so that layers between
/// backward and the optimizer (loss scalers, accumulation, clipping) compute on such gradients in host memory.
///
/// The operations of those layers are computed on the host for f32 tensors: addition, scaling, sums, casts, reads, tests for
/// non-finite elements. A sum is computed in f64 and rounded once; all else has the bits of the device's f32. Any other operation first
/// uploads its operands, and its result stays on the device. A tensor on the device costs nothing more than without this layer.
#[derive(Clone, Copy, Debug, Default)]
pub struct WithHost<B> {
    inner: PhantomData<B>,
}

impl<B: Backend> BackendTypes for WithHost<B> {
    burn_decorator::forward_types!(B, float tensor: PlacedTensor<B::FloatTensorPrimitive, B::Device>);
}

#[deny(clippy::missing_trait_methods)]
impl<B: Backend> Backend for WithHost<B> {
    burn_decorator::forward_device!(B);

    fn name(device: &Self::Device) -> String {
        B::name(device)
    }

    fn supports_dtype(device: &Self::Device, dtype: DType) -> bool {
        B::supports_dtype(device, dtype)
    }

    fn dtype_usage(device: &Self::Device, dtype: DType) -> DTypeUsageSet {
        B::dtype_usage(device, dtype)
    }
}

thread_local! {
    static STAYS: Cell<bool> = const { Cell::new(false) };
}

/// A tensor of data that stays in host memory, if the backend has a [`WithHost`] in it; otherwise one on the device.
pub(crate) fn on_host<I: Backend>(data: TensorData, device: &I::Device) -> FloatTensor<I> {
    /// Also where a backend outside of this one panics.
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            STAYS.set(false);
        }
    }
    let _restore = Restore;
    STAYS.set(true);
    I::float_from_data(data, device)
}

/// A float tensor of [`WithHost`].
#[derive(Clone, Debug)]
pub enum PlacedTensor<T, D> {
    /// On the device.
    Device(T),
    /// In host memory.
    Host(HostTensor<D>),
}

/// A tensor in host memory. Clones share its elements until one of them is changed.
#[derive(Clone)]
pub struct HostTensor<D> {
    data: Arc<TensorData>,
    shape: Shape,
    /// The device to which operations upload it.
    device: D,
}

impl<T: TensorMetadata, D: Clone> PlacedTensor<T, D> {
    /// Uploads the tensor.
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

/// Elements of one task: one thread alone does not reach the speed of the memory.
const CHUNK: usize = 1 << 16;

/// The operations on the host. `Err` returns the tensor itself, if its type or shape must be computed on the device.
impl<D> HostTensor<D> {
    fn new(data: TensorData, device: D) -> Self {
        Self {
            shape: data.shape.clone(),
            data: Arc::new(data),
            device,
        }
    }

    /// Its elements. Copies them if other tensors share them.
    fn into_data(self) -> TensorData {
        let mut data = Arc::unwrap_or_clone(self.data);
        data.shape = self.shape;
        data
    }

    fn floats(&self) -> Option<&[f32]> {
        self.data.as_slice().ok()
    }

    /// A flat tensor of other elements.
    fn flat(self, values: Vec<f32>) -> Self {
        let shape = Shape::from([values.len()]);
        Self::new(TensorData::new(values, shape), self.device)
    }

    /// Maps each element of an f32 tensor.
    fn map(mut self, f: impl Fn(f32) -> f32 + Sync) -> Result<Self, Self> {
        if self.data.dtype != DType::F32 {
            return Err(self);
        }
        let own = Arc::make_mut(&mut self.data).as_mut_slice::<f32>();
        let chunks = own.expect("elements of f32").par_chunks_mut(CHUNK);
        chunks.for_each(|chunk| chunk.iter_mut().for_each(|x| *x = f(*x)));
        Ok(self)
    }

    /// Combines the elements of two f32 tensors of one shape.
    fn zip(mut self, other: &Self, f: impl Fn(f32, f32) -> f32 + Sync) -> Result<Self, Self> {
        let Some(others) = other.floats().filter(|_| self.shape == other.shape) else {
            return Err(self);
        };
        if self.data.dtype != DType::F32 {
            return Err(self);
        }
        let own = Arc::make_mut(&mut self.data).as_mut_slice::<f32>();
        let chunks = own.expect("elements of f32").par_chunks_mut(CHUNK);
        let pairs = chunks.zip(others.par_chunks(CHUNK));
        pairs.for_each(|(own, others)| {
            own.iter_mut().zip(others).for_each(|(x, y)| *x = f(*x, *y));
        });
        Ok(self)
    }

    /// The sum of an f32 tensor, rounded once.
    fn sum(self) -> Result<Self, Self> {
        let Some(values) = self.floats() else {
            return Err(self);
        };
        let sum = |chunk: &[f32]| chunk.iter().copied().map(f64::from).sum::<f64>();
        // Sums of chunks are added in order, so that the bits do not depend on threads.
        let sums: Vec<_> = values.par_chunks(CHUNK).map(sum).collect();
        let sum = sums.iter().sum::<f64>() as f32;
        Ok(self.flat(vec![sum]))
    }

    fn cast(self, dtype: FloatDType) -> Self
    where
        D: Clone,
    {
        if self.data.dtype == dtype.into() {
            return self;
        }
        let device = self.device.clone();
        Self::new(self.into_data().convert_dtype(dtype.into()), device)
    }

    /// Whether all elements are known to be finite.
    fn is_finite(&self) -> bool {
        matches!(self.data.dtype, DType::F32 | DType::BF16 | DType::F16) && is_finite(&self.data)
    }
}
