//! The gather of updated shards into parameters.

use std::collections::{HashMap, VecDeque};

use burn_backend::TensorData;
use burn_ranks::shard::Bucket;
use burn_ranks::{GatheredParts, HostBuffer, Pending, ProcessGroup, Split};

use crate::error::ZeroError;
use crate::reduce::{GradientReducer, Layout, StepTag};

/// The gather of the shards that the optimizer has updated. One bucket is gathered ahead; there are
/// never two copies of all parameters.
pub(super) struct Gather<'a> {
    layout: &'a Layout,
    group: &'a dyn ProcessGroup,
    at: StepTag,
    /// By parameter.
    shards: HashMap<usize, Vec<f32>>,
    /// Whether any rank has updated each parameter.
    changed: Vec<bool>,
    /// Buckets being gathered, in their order; `None` for a bucket in which nothing has changed.
    underway: VecDeque<Option<Pending<GatheredParts>>>,
    /// Number of buckets gathered before them.
    gathered: usize,
    /// Parameters that are gathered in part, or not taken yet.
    arriving: HashMap<usize, Vec<f32>>,
}

impl<'a> Gather<'a> {
    pub(super) fn new(
        reducer: &'a GradientReducer,
        at: StepTag,
        shards: HashMap<usize, Vec<f32>>,
        changed: Vec<bool>,
    ) -> Self {
        Self {
            layout: reducer.layout(),
            group: reducer.group(),
            at,
            shards,
            changed,
            underway: VecDeque::new(),
            gathered: 0,
            arriving: HashMap::new(),
        }
    }

    /// The new value of a parameter; `None` if it has not changed. To be called in the order of
    /// parameters.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn take(&mut self, parameter: usize) -> Result<Option<TensorData>, ZeroError> {
        let known = &self.layout.parameters()[parameter];
        if !self.changed[parameter] || known.elements() == 0 {
            return Ok(None);
        }
        if let Some(last) = self.layout.map().last_bucket(parameter) {
            self.gather_to(last)?;
        }
        let Some(elements) = self.arriving.remove(&parameter) else {
            return Ok(None);
        };
        let data = TensorData::new(elements, known.shape.clone());
        Ok(Some(data.convert_dtype(known.dtype)))
    }

    /// Gathers all buckets up to this one, and starts to gather the next.
    fn gather_to(&mut self, last: usize) -> Result<(), ZeroError> {
        let buckets = self.layout.map().buckets();
        while self.gathered <= last {
            let bucket = self.gathered;
            let ahead = buckets.iter().enumerate().take(bucket + 2);
            for (number, next) in ahead.skip(bucket + self.underway.len()) {
                let started = self.start(number, next);
                self.underway.push_back(started);
            }
            self.gathered += 1;
            let Some(pending) = self.underway.pop_front().flatten() else {
                continue;
            };
            let (parts, bucket) = (pending.wait()?, &buckets[bucket]);
            for segment in bucket.segments() {
                if !self.changed[segment.parameter] {
                    continue;
                }
                let whole = self.layout.parameters()[segment.parameter].elements();
                let arriving = self
                    .arriving
                    .entry(segment.parameter)
                    .or_insert_with(|| vec![0.0; whole]);
                let to = &mut arriving[segment.range.clone()];
                parts.read(segment.owner, bucket.in_part(segment), to);
            }
        }
        Ok(())
    }

    /// Starts to gather a bucket, unless nothing in it has changed.
    fn start(&mut self, number: usize, bucket: &Bucket) -> Option<Pending<GatheredParts>> {
        let (layout, mut segments) = (self.layout, bucket.segments().iter());
        if !segments.any(|segment| self.changed[segment.parameter]) {
            return None;
        }
        let own = |parameter| self.shards.get(&parameter).map(Vec::as_slice);
        let part = HostBuffer::from_f32(layout.dtype(bucket), layout.own_part(bucket, own));
        let split = Split::Counts(bucket.counts());
        let name = layout.bucket_name(number, bucket, &self.at);
        let label = format!("parameters of {name}");
        Some(Pending::start(self.group, move |ranks| {
            ranks.all_gather_parts(&label, part, split)
        }))
    }
}
