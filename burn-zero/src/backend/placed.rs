//! Tensors that are on the device or in host memory, and what is computed in host memory.

use core::fmt;
use std::sync::Arc;

use burn_backend::{Backend, TensorMetadata};
use burn_decorator::simulated::values_are_simulated;
use burn_decorator::types::*;
use rayon::prelude::*;

use crate::host::is_finite;

/// A float tensor of [`WithHost`](super::WithHost).
#[derive(Clone, Debug)]
pub enum PlacedTensor<T, D> {
    /// On the device.
    Device(T),
    /// In host memory.
    Host(HostTensor<D>),
    /// A gradient of one rank, in either memory, until an update reads it.
    OfRank(OfRank<T, D>),
}

/// A tensor in host memory. Clones share its elements until one of them is changed.
#[derive(Clone)]
pub struct HostTensor<D> {
    pub(super) data: Arc<TensorData>,
    pub(super) shape: Shape,
    /// The device to which operations upload it.
    pub(super) device: D,
}

/// What a rank has of a gradient between backward and the update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GradientPart {
    /// Its shard of the reduced gradient (stages 2 and 3).
    Shard,
    /// The whole gradient of its own batch, which the step reduces (stages 0 and 1).
    OwnBatch,
}

impl fmt::Display for GradientPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Shard => "this rank's shard of it (ZeRO stages 2 and 3)",
            Self::OwnBatch => {
                "that of this rank's batch alone, which the step reduces over the ranks (ZeRO stages 0 and 1)"
            }
        })
    }
}

/// A gradient of one rank, on the device or in host memory.
#[derive(Clone, Debug)]
pub struct OfRank<T, D> {
    pub(super) tensor: Box<PlacedTensor<T, D>>,
    pub(super) part: GradientPart,
}

impl<T: TensorMetadata, D: Clone> PlacedTensor<T, D> {
    /// Uploads the tensor.
    pub(crate) fn up<B>(self) -> T
    where
        B: Backend<Device = D, FloatTensorPrimitive = T>,
    {
        match self.unmarked() {
            Self::Host(tensor) => {
                let device = tensor.device.clone();
                B::float_from_data(tensor.into_data(), &device)
            }
            Self::Device(tensor) => tensor,
            Self::OfRank(_) => unreachable!("a tensor without its mark"),
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
            Self::OfRank(_) => self.placed().dtype(),
        }
    }

    #[inline]
    fn shape(&self) -> Shape {
        match self {
            Self::Device(tensor) => tensor.shape(),
            Self::Host(tensor) => tensor.shape.clone(),
            Self::OfRank(_) => self.placed().shape(),
        }
    }

    #[inline]
    fn rank(&self) -> usize {
        match self {
            Self::Device(tensor) => tensor.rank(),
            Self::Host(tensor) => tensor.shape.num_dims(),
            Self::OfRank(_) => self.placed().rank(),
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

/// The second operand of an elementwise operation on a tensor in host memory.
pub(super) enum Operand<'a> {
    Number(f32),
    /// One for each element of the tensor.
    Elements(&'a [f32]),
}

/// Elements of one task: one thread alone does not reach the bandwidth of the memory.
const CHUNK: usize = 1 << 16;

/// The operations on the host. `Err` returns the tensor itself if its type or shape is supported on
/// the device only.
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

    pub(super) fn floats(&self) -> Option<&[f32]> {
        self.data.as_slice().ok()
    }

    /// A flat tensor of `values` for the same device.
    pub(super) fn flat(self, values: Vec<f32>) -> Self {
        let shape = Shape::from([values.len()]);
        Self::new(TensorData::new(values, shape), self.device)
    }

    /// Combines each element of an f32 tensor with the operand's.
    pub(super) fn combine(
        mut self,
        other: Operand<'_>,
        f: impl Fn(f32, f32) -> f32 + Sync,
    ) -> Result<Self, Self> {
        if self.data.dtype != DType::F32 {
            return Err(self);
        }
        // An estimate of a large model has no memory for its gradients.
        if values_are_simulated() {
            return Ok(self);
        }
        let own = Arc::make_mut(&mut self.data).as_mut_slice::<f32>();
        let own = own.expect("elements of f32").par_iter_mut();
        match other {
            Operand::Number(y) => own.with_min_len(CHUNK).for_each(|x| *x = f(*x, y)),
            Operand::Elements(others) => {
                let pairs = own.zip(others).with_min_len(CHUNK);
                pairs.for_each(|(x, y)| *x = f(*x, *y));
            }
        }
        Ok(self)
    }

    /// The sum of an f32 tensor, rounded once.
    pub(super) fn sum(self) -> Result<Self, Self> {
        let Some(values) = self.floats() else {
            return Err(self);
        };
        if values_are_simulated() {
            return Ok(self.flat(vec![0.0]));
        }
        let sum = |chunk: &[f32]| chunk.iter().copied().map(f64::from).sum::<f64>();
        // Sums of chunks are added in order, so that the bits do not depend on threads.
        let sums: Vec<_> = values.par_chunks(CHUNK).map(sum).collect();
        let sum = sums.iter().sum::<f64>() as f32;
        Ok(self.flat(vec![sum]))
    }

    pub(super) fn cast(self, dtype: FloatDType) -> Self
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
    pub(super) fn is_finite(&self) -> bool {
        matches!(self.data.dtype, DType::F32 | DType::BF16 | DType::F16) && is_finite(&self.data)
    }
}
