//! The gather of updated shards into parameters.

use std::collections::{HashMap, HashSet};

use burn_backend::{Backend, DType, Shape, TensorData};

use crate::ZeroError;
use crate::group::{BufferDtype, HostBuffer, Pending, ProcessGroup, Split};
use crate::host::{HostRead, floats};
use crate::parameters::NewValue;
use crate::reduce::{GradientReducer, Layout, StepTag};
use crate::shard::Bucket;

/// The gather of the shards that the optimizer has updated. One bucket is gathered ahead; there are never two copies of all parameters.
pub(super) struct Gather<'a, I: Backend> {
    layout: &'a Layout,
    group: &'a dyn ProcessGroup,
    at: StepTag,
    /// By parameter.
    shards: HashMap<usize, NewValue<I>>,
    /// Whether any rank has updated each parameter.
    changed: Vec<bool>,
    /// Shards on the host, until they are sent.
    sending: HashMap<usize, Vec<f32>>,
    underway: HashMap<usize, Pending<HostBuffer>>,
    /// Number of buckets gathered so far, in their order.
    gathered: usize,
    /// Parameters that are gathered in part, or not taken yet.
    arriving: HashMap<usize, Vec<f32>>,
}

impl<'a, I: Backend> Gather<'a, I> {
    pub(super) fn new(
        reducer: &'a GradientReducer,
        at: StepTag,
        shards: HashMap<usize, NewValue<I>>,
        changed: Vec<bool>,
    ) -> Self {
        Self {
            layout: reducer.layout(),
            group: reducer.group(),
            at,
            shards,
            changed,
            sending: HashMap::new(),
            underway: HashMap::new(),
            gathered: 0,
            arriving: HashMap::new(),
        }
    }

    /// The parameters whose shards this rank's optimizer has updated on the host.
    pub(super) fn on_host(&self) -> HashSet<usize> {
        let shards = self.shards.iter();
        let on_host = shards.filter(|(_, shard)| matches!(shard, NewValue::Host(_)));
        on_host.map(|(parameter, _)| *parameter).collect()
    }

    /// The new value of a parameter; `None` if it has not changed. To be called in the order of parameters.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn take(&mut self, parameter: usize) -> Result<Option<NewValue<I>>, ZeroError> {
        let known = &self.layout.parameters()[parameter];
        if !self.changed[parameter] || known.elements() == 0 {
            return Ok(None);
        }
        if self.layout.holds_all() {
            let shape = Shape::from(known.shape.clone());
            let shard = self.shards.remove(&parameter);
            return Ok(shard.map(|shard| shard.reshaped(shape)));
        }
        if let Some(last) = self.layout.map().last_bucket(parameter) {
            self.gather_to(last)?;
        }
        let Some(elements) = self.arriving.remove(&parameter) else {
            return Ok(None);
        };
        let data = TensorData::new(elements, known.shape.clone());
        let data = data.convert_dtype(known.dtype);
        Ok(Some(NewValue::Host(data)))
    }

    /// Gathers all buckets up to this one, and starts to gather the next.
    fn gather_to(&mut self, last: usize) -> Result<(), ZeroError> {
        while self.gathered <= last {
            let bucket = self.gathered;
            self.start(bucket);
            if bucket + 1 < self.layout.map().buckets().len() {
                self.start(bucket + 1);
            }
            self.gathered += 1;
            let Some(pending) = self.underway.remove(&bucket) else {
                continue;
            };
            let elements = pending.wait()?.into_f32();
            for segment in self.layout.map().buckets()[bucket].segments() {
                if !self.changed[segment.parameter] {
                    continue;
                }
                let whole = self.layout.parameters()[segment.parameter].elements();
                let arriving = self.arriving.entry(segment.parameter);
                let arriving = arriving.or_insert_with(|| vec![0.0; whole]);
                let at = segment.in_bucket();
                arriving[segment.range.clone()].copy_from_slice(&elements[at]);
            }
        }
        Ok(())
    }

    /// Starts to gather a bucket, unless nothing in it has changed.
    fn start(&mut self, bucket: usize) {
        let layout = self.layout;
        let known = &layout.map().buckets()[bucket];
        let changed = known
            .segments()
            .iter()
            .any(|segment| self.changed[segment.parameter]);
        if !changed || self.underway.contains_key(&bucket) {
            return;
        }
        let own = known.part(layout.rank());
        let mut part = vec![0.0; own.len()];
        let segments = known.segments().iter();
        for segment in segments.filter(|segment| segment.owner == layout.rank()) {
            if let Some(shard) = self.shards.remove(&segment.parameter) {
                let elements = match shard {
                    NewValue::Device(shard) => HostRead::start::<I>(shard).wait(),
                    NewValue::Host(data) => floats(data),
                };
                self.sending.insert(segment.parameter, elements);
            }
            let Some(shard) = self.sending.get(&segment.parameter) else {
                continue;
            };
            let from = layout.position(segment.parameter, segment.range.start);
            let to = segment.start - own.start;
            part[to..to + segment.range.len()]
                .copy_from_slice(&shard[from..from + segment.range.len()]);
            if from + segment.range.len() == shard.len() {
                self.sending.remove(&segment.parameter);
            }
        }
        let part = HostBuffer::from_f32(self.dtype(known), part);
        let split = Split::Counts(known.counts());
        let label = format!(
            "parameters of {}",
            layout.bucket_name(bucket, known, &self.at)
        );
        let pending = Pending::start(self.group, move |ranks| {
            ranks.all_gather(&label, part, split, None)
        });
        self.underway.insert(bucket, pending);
    }

    /// The narrowest type that holds the bucket's parameters exactly.
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
