//! The updated pieces of all ranks becoming parameters.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend};

use super::parameters::Parameters;
use crate::ZeroError;
use crate::group::{BufferDtype, HostBuffer, PendingBuffer, ProcessGroup, Split};
use crate::host::HostRead;
use crate::reduce::{Bucket, Layout};

/// The module with its updated parameters, as new leaves. One bucket is gathered ahead; at no time are there two copies of
/// all parameters.
///
/// # Errors
///
/// Those of the group.
pub(super) fn update<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    parameters: &Parameters,
    updated: Updated<'_, B::InnerBackend>,
) -> Result<M, ZeroError> {
    let mut update = Update {
        parameters,
        updated,
        done: HashMap::new(),
        failed: None,
    };
    let module = module.map(&mut update);
    match update.failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// The pieces that the optimizer has updated, by parameter.
pub(super) struct Updated<'a, I: Backend> {
    pub(super) layout: &'a Layout,
    pub(super) group: &'a dyn ProcessGroup,
    pub(super) pieces: HashMap<usize, FloatTensor<I>>,
    /// Which parameters any rank has updated.
    pub(super) changed: Vec<bool>,
    /// Whether this rank's pieces are the whole parameters.
    pub(super) whole: bool,
    pub(super) underway: HashMap<usize, PendingBuffer>,
    /// Gathered parameters that were not asked for yet.
    pub(super) gathered: HashMap<usize, TensorData>,
}

impl<I: Backend> Updated<'_, I> {
    /// The new value of a parameter; `None` if it has not changed.
    fn take(
        &mut self,
        parameter: usize,
        device: &I::Device,
    ) -> Result<Option<FloatTensor<I>>, ZeroError> {
        if !self.changed[parameter] {
            return Ok(None);
        }
        let shape = Shape::from(self.layout.parameters()[parameter].shape.clone());
        if self.whole {
            let piece = self.pieces.remove(&parameter);
            return Ok(piece.map(|piece| I::float_reshape(piece, shape)));
        }
        if !self.gathered.contains_key(&parameter) {
            self.gather(self.layout.bucket_of(parameter))?;
        }
        let data = self.gathered.remove(&parameter);
        Ok(data.map(|data| I::float_from_data(data, device)))
    }

    /// Gathers a bucket, and starts with the one that the module's order needs next.
    fn gather(&mut self, index: usize) -> Result<(), ZeroError> {
        let layout = self.layout;
        self.start(index);
        let next = (0..index).rev().find(|&next| self.has_changed(next));
        if let Some(next) = next {
            self.start(next);
        }
        let Some(pending) = self.underway.remove(&index) else {
            return Ok(());
        };
        let elements = pending.wait()?.into_f32();
        let bucket = &layout.buckets()[index];
        for &parameter in bucket.parameters.iter().filter(|&&p| self.changed[p]) {
            let known = &layout.parameters()[parameter];
            let mut whole = vec![0.0; known.elements()];
            for segment in bucket.segments.iter().filter(|s| s.parameter == parameter) {
                let from = segment.offset..segment.offset + segment.range.len();
                whole[segment.range.clone()].copy_from_slice(&elements[from]);
            }
            let data = TensorData::new(whole, known.shape.clone()).convert_dtype(known.dtype);
            self.gathered.insert(parameter, data);
        }
        Ok(())
    }

    fn has_changed(&self, bucket: usize) -> bool {
        let mut parameters = self.layout.buckets()[bucket].parameters.iter();
        parameters.any(|&parameter| self.changed[parameter])
    }

    fn start(&mut self, index: usize) {
        if self.underway.contains_key(&index) {
            return;
        }
        let bucket = &self.layout.buckets()[index];
        let rank = self.group.rank();
        let mut part = vec![0.0; bucket.parts[rank]];
        let start = bucket.start(rank);
        for segment in bucket.segments.iter().filter(|s| s.rank == rank) {
            let Some(piece) = self.pieces.remove(&segment.parameter) else {
                continue;
            };
            let from = segment.offset - start;
            part[from..from + segment.range.len()]
                .copy_from_slice(&HostRead::start::<I>(piece).wait());
        }
        let part = HostBuffer::from_f32(self.dtype(bucket), part);
        let split = Split::Counts(bucket.parts.clone());
        let label = format!("parameters of {}", self.layout.bucket_name(index));
        let pending = self.group.start_all_gather(&label, part, split, None);
        self.underway.insert(index, pending);
    }

    /// The narrowest type that holds the bucket's parameters as they are.
    fn dtype(&self, bucket: &Bucket) -> BufferDtype {
        let all = |dtype| {
            let mut parameters = bucket.parameters.iter();
            parameters.all(|&parameter| self.layout.parameters()[parameter].dtype == dtype)
        };
        if all(DType::BF16) {
            BufferDtype::Bf16
        } else if all(DType::F16) {
            BufferDtype::F16
        } else {
            BufferDtype::F32
        }
    }
}

struct Update<'a, B: AutodiffBackend> {
    parameters: &'a Parameters,
    updated: Updated<'a, B::InnerBackend>,
    /// One that the module holds twice stays one leaf.
    done: HashMap<usize, FloatTensor<B>>,
    failed: Option<ZeroError>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Update<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(&index) = self.parameters.index.get(&param.id) else {
            return param;
        };
        if let Some(done) = self.done.get(&index) {
            let (id, _, mapper) = param.consume();
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(done.clone()));
            return Param::from_mapped_value(id, leaf, mapper);
        }
        if self.failed.is_some() {
            return param;
        }
        let device = param.val().device();
        match self.updated.take(index, &device) {
            Ok(None) => param,
            Ok(Some(value)) => {
                let (id, _, mapper) = param.consume();
                let value = Tensor::from_primitive(TensorPrimitive::Float(value));
                let leaf = Tensor::<B, D>::from_inner(value).require_grad();
                let primitive = leaf.clone().into_primitive().tensor();
                self.done.insert(index, primitive);
                Param::from_mapped_value(id, leaf, mapper)
            }
            Err(error) => {
                self.failed = Some(error);
                param
            }
        }
    }
}
