//! The updated pieces of all ranks becoming parameters.

use std::collections::{BTreeMap, HashMap};

use burn::module::{AutodiffModule, ModuleMapper, Param};
use burn::tensor::{DType, Shape, Tensor, TensorData, TensorPrimitive};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend};

use super::parameter_shards::{Updated, shard_id};
use super::parameters::Parameters;
use super::pieces::cut_one;
use crate::ZeroError;
use crate::group::{BufferDtype, HostBuffer, Pending, ProcessGroup, Split};
use crate::host::{HostRead, floats};
use crate::offload::Kept;
use crate::reduce::{Layout, StepTag};
use crate::shard::Bucket;

/// The module with its updated parameters, as new leaves. One bucket is gathered ahead; at no time are there two copies of
/// all parameters.
///
/// # Errors
///
/// Those of the group.
pub(super) fn update<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    parameters: &Parameters,
    gather: Gather<'_, B::InnerBackend>,
) -> Result<M, ZeroError> {
    let mut update = Update {
        parameters,
        gather,
        done: HashMap::new(),
        failed: None,
    };
    let module = module.map(&mut update);
    match update.failed {
        Some(error) => Err(error),
        None => Ok(module),
    }
}

/// The pieces that the optimizer has updated, on their way to all ranks.
pub(super) struct Gather<'a, I: Backend> {
    layout: &'a Layout,
    group: &'a dyn ProcessGroup,
    at: StepTag,
    /// By parameter.
    pieces: HashMap<usize, Updated<I>>,
    /// Whether any rank has updated each parameter.
    changed: Vec<bool>,
    /// Pieces on the host, until they are sent.
    sending: HashMap<usize, Vec<f32>>,
    underway: BTreeMap<usize, Pending<HostBuffer>>,
    /// The first buckets are gathered.
    gathered: usize,
    /// Parameters that are gathered in part, or were not asked for yet.
    arriving: HashMap<usize, Vec<f32>>,
    /// Which pieces of this rank its optimizer waits for, to be on the device.
    kept: Kept,
}

impl<'a, I: Backend> Gather<'a, I> {
    pub(super) fn new(
        layout: &'a Layout,
        group: &'a dyn ProcessGroup,
        at: StepTag,
        pieces: HashMap<usize, Updated<I>>,
        changed: Vec<bool>,
        kept: Kept,
    ) -> Self {
        Self {
            layout,
            group,
            at,
            pieces,
            changed,
            sending: HashMap::new(),
            underway: BTreeMap::new(),
            gathered: 0,
            arriving: HashMap::new(),
            kept,
        }
    }

    /// The new value of a parameter; `None` if it has not changed. Parameters are asked for in their order.
    fn take(
        &mut self,
        parameter: usize,
        device: &I::Device,
    ) -> Result<Option<FloatTensor<I>>, ZeroError> {
        let known = &self.layout.parameters()[parameter];
        if !self.changed[parameter] || known.elements() == 0 {
            return Ok(None);
        }
        if self.layout.holds_all() {
            let shape = Shape::from(known.shape.clone());
            let piece = self.pieces.remove(&parameter).map(|piece| match piece {
                Updated::Device(piece) => piece,
                Updated::Host(data) => I::float_from_data(data, device),
            });
            return Ok(piece.map(|piece| I::float_reshape(piece, shape)));
        }
        if let Some(last) = self.layout.buckets_of(parameter).last() {
            self.gather_to(last)?;
        }
        let Some(elements) = self.arriving.remove(&parameter) else {
            return Ok(None);
        };
        let data = TensorData::new(elements, known.shape.clone());
        let value = I::float_from_data(data.convert_dtype(known.dtype), device);
        let id = shard_id(parameter);
        if self.kept.is_awaited(id) {
            let own = cut_one::<I>(self.layout, parameter, value.clone());
            self.kept.arrived::<I>(id, own);
        }
        Ok(Some(value))
    }

    /// Gathers all buckets up to this one, and starts with the one behind it.
    fn gather_to(&mut self, last: usize) -> Result<(), ZeroError> {
        while self.gathered <= last {
            let bucket = self.gathered;
            self.start(bucket);
            if bucket + 1 < self.layout.buckets().len() {
                self.start(bucket + 1);
            }
            self.gathered += 1;
            let Some(pending) = self.underway.remove(&bucket) else {
                continue;
            };
            let elements = pending.wait()?.into_f32();
            for slot in self.layout.slots(bucket, 0..elements.len()) {
                if !self.changed[slot.parameter] {
                    continue;
                }
                let whole = self.layout.parameters()[slot.parameter].elements();
                let arriving = self.arriving.entry(slot.parameter);
                let arriving = arriving.or_insert_with(|| vec![0.0; whole]);
                let at = slot.in_bucket();
                arriving[slot.range].copy_from_slice(&elements[at]);
            }
        }
        Ok(())
    }

    /// Starts to gather a bucket, unless nothing in it has changed.
    fn start(&mut self, bucket: usize) {
        let layout = self.layout;
        let known = &layout.buckets()[bucket];
        let changed = known
            .segments()
            .iter()
            .any(|segment| self.changed[segment.parameter]);
        if !changed || self.underway.contains_key(&bucket) {
            return;
        }
        let own = layout.own_part(bucket);
        let mut part = vec![0.0; own.len()];
        for slot in layout.slots(bucket, own.clone()) {
            if let Some(piece) = self.pieces.remove(&slot.parameter) {
                let elements = match piece {
                    Updated::Device(piece) => HostRead::start::<I>(piece).wait(),
                    Updated::Host(data) => floats(data),
                };
                self.sending.insert(slot.parameter, elements);
            }
            let Some(piece) = self.sending.get(&slot.parameter) else {
                continue;
            };
            let from = layout.position(slot.parameter, slot.range.start);
            let to = slot.start - own.start;
            part[to..to + slot.range.len()].copy_from_slice(&piece[from..from + slot.range.len()]);
            if from + slot.range.len() == piece.len() {
                self.sending.remove(&slot.parameter);
            }
        }
        let part = HostBuffer::from_f32(self.dtype(known), part);
        let split = Split::Counts(known.counts());
        let label = format!("parameters of {}", layout.bucket_name(bucket, self.at));
        let pending = self.group.start_all_gather(&label, part, split, None);
        self.underway.insert(bucket, pending);
    }

    /// The narrowest type that holds the bucket's parameters as they are.
    fn dtype(&self, bucket: &Bucket) -> BufferDtype {
        let all = |dtype| {
            let parameters = self.layout.parameters();
            let mut segments = bucket.segments().iter();
            segments.all(|segment| parameters[segment.parameter].dtype == dtype)
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
    gather: Gather<'a, B::InnerBackend>,
    /// One that the module holds twice stays one leaf.
    done: HashMap<usize, FloatTensor<B>>,
    failed: Option<ZeroError>,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Update<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let Some(&index) = self.parameters.index.get(&param.id) else {
            return param;
        };
        // A frozen copy under the same id is another tensor.
        if !param.val().is_require_grad() {
            return param;
        }
        if let Some(done) = self.done.get(&index) {
            let (id, _, mapper) = param.consume();
            let leaf = Tensor::from_primitive(TensorPrimitive::Float(done.clone()));
            return Param::from_mapped_value(id, leaf, mapper);
        }
        if self.failed.is_some() {
            return param;
        }
        let device = param.val().device();
        match self.gather.take(index, &device) {
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
