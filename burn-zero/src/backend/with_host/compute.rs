//! What is computed on the host, on all threads: with one, the speed of the memory is not reached.

use core::ops::Range;
use std::sync::Arc;

use burn_backend::{DType, FloatDType, Shape, TensorData};
use half::{bf16, f16};
use rayon::prelude::*;

use super::tensor::HostTensor;

const CHUNK: usize = 1 << 16;

impl<D: Clone> HostTensor<D> {
    /// Its elements, if they are f32: those are computed with on the host.
    pub(super) fn floats(&self) -> Option<&[f32]> {
        self.data.as_slice().ok()
    }

    /// The element, if it is the only one.
    pub(super) fn only(&self) -> Option<f32> {
        match self.floats() {
            Some([only]) => Some(*only),
            _ => None,
        }
    }

    /// Each element of an f32 tensor, in place where nobody shares them.
    pub(super) fn map(mut self, f: impl Fn(f32) -> f32 + Sync) -> Self {
        if let Some(own) = own(&mut self.data) {
            let chunks = own.par_chunks_mut(CHUNK);
            chunks.for_each(|chunk| chunk.iter_mut().for_each(|x| *x = f(*x)));
            return self;
        }
        let mut made = vec![0.0; self.shape.num_elements()];
        let from = self.floats().unwrap_or_default().par_chunks(CHUNK);
        let chunks = made.par_chunks_mut(CHUNK).zip(from);
        chunks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(to, x)| *to = f(*x)));
        self.with(made)
    }

    /// The elements of two f32 tensors of one shape, in place of those that nobody shares.
    pub(super) fn zip(mut self, mut other: Self, f: impl Fn(f32, f32) -> f32 + Sync) -> Self {
        if let (Some(own), Some(other)) = (own(&mut self.data), other.floats()) {
            each(own, other, f);
            return self;
        }
        if let (Some(own), Some(first)) = (own(&mut other.data), self.floats()) {
            each(own, first, |y, x| f(x, y));
            return other;
        }
        let mut made = self.floats().unwrap_or_default().to_vec();
        each(&mut made, other.floats().unwrap_or_default(), f);
        self.with(made)
    }

    /// The sum of an f32 tensor, rounded once.
    pub(super) fn sum(self) -> Self {
        let chunks = self.floats().unwrap_or_default().par_chunks(CHUNK);
        // Sums of chunks are added in their order: the same bits whatever the threads do.
        let sums: Vec<_> = chunks.map(sum).collect();
        let sum = sums.iter().sum::<f64>() as f32;
        self.reshape(Shape::from([1])).with(vec![sum])
    }

    /// The tensor in another type, if both types are known here.
    pub(super) fn cast(self, dtype: FloatDType) -> Result<Self, Self> {
        let to = DType::from(dtype);
        let known = |dtype| matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        if self.data.dtype == to {
            return Ok(self);
        }
        if !known(self.data.dtype) || !known(to) {
            return Err(self);
        }
        let device = self.device.clone();
        Ok(Self::new(self.into_data().convert_dtype(to), device))
    }

    /// Whether any element is so; `None` of a type that is not known here.
    pub(super) fn any(&self, is: impl Fn(f32) -> bool + Sync) -> Option<bool> {
        fn any<E: Sync>(values: &[E], is: impl Fn(&E) -> bool + Sync) -> bool {
            // Without a branch an element, so that it becomes vectors.
            let chunk = |values: &[E]| values.iter().fold(false, |any, value| any | is(value));
            values.par_chunks(CHUNK).any(chunk)
        }
        match self.data.dtype {
            DType::F32 => Some(any(self.floats()?, |x| is(*x))),
            DType::BF16 => Some(any(self.data.as_slice::<bf16>().ok()?, |x| is(x.to_f32()))),
            DType::F16 => Some(any(self.data.as_slice::<f16>().ok()?, |x| is(x.to_f32()))),
            _ => None,
        }
    }

    /// Some elements of a flat f32 tensor.
    pub(super) fn range(self, range: Range<usize>) -> Option<Self> {
        let values = self.floats()?.get(range)?.to_vec();
        let shape = Shape::from([values.len()]);
        Some(self.reshape(shape).with(values))
    }

    /// Flat f32 tensors, one after the other.
    pub(super) fn cat(tensors: &[&Self]) -> Option<Self> {
        let mut all = Vec::new();
        for tensor in tensors {
            all.extend_from_slice(tensor.floats().filter(|_| tensor.shape.num_dims() == 1)?);
        }
        let shape = Shape::from([all.len()]);
        Some((*tensors.first()?).clone().reshape(shape).with(all))
    }

    /// Other elements, as many as the shape says.
    fn with(self, values: Vec<f32>) -> Self {
        Self {
            data: Arc::new(TensorData::new(values, self.shape.clone())),
            ..self
        }
    }
}

/// The elements of f32 data that nobody shares.
fn own(data: &mut Arc<TensorData>) -> Option<&mut [f32]> {
    Arc::get_mut(data)?.as_mut_slice().ok()
}

fn each(to: &mut [f32], from: &[f32], f: impl Fn(f32, f32) -> f32 + Sync) {
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.iter_mut().zip(from).for_each(|(x, y)| *x = f(*x, *y)));
}

/// In eight lanes, which become vectors.
fn sum(values: &[f32]) -> f64 {
    let mut lanes = [0.0_f64; 8];
    let (whole, rest) = values.as_chunks::<8>();
    for eight in whole {
        lanes
            .iter_mut()
            .zip(eight)
            .for_each(|(lane, x)| *lane += f64::from(*x));
    }
    lanes
        .iter_mut()
        .zip(rest)
        .for_each(|(lane, x)| *lane += f64::from(*x));
    lanes.iter().sum()
}
