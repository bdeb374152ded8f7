//! Units: parameters that are gathered together, and the order in which they are used.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_checkpoint::{UploadOrder, UploadPlace};
use burn_decorator::{HostRead, UseOrder, shared};
use burn_ranks::shard::Bucket;
use burn_ranks::{BufferDtype, Collectives, HostBuffer, Split};
use parking_lot::Mutex;

use crate::host::{exchanged, not_read, widened};
use crate::reduce::Layout;
use crate::{Memory, ZeroError};

/// All elements of a unit's parameters, by parameter.
pub(crate) type Gathered = HashMap<usize, TensorData>;

/// Parameters that are gathered together: by default those of a repeated block, such as `blocks.0`,
/// or all that are in none.
pub(crate) struct Unit {
    /// By default the path of the block; empty for the unit of all others.
    pub(super) path: String,
    pub(super) parameters: Vec<usize>,
}

/// This rank's elements of those of a unit's parameters that the model has, flat, each in the type
/// in which it is gathered; by parameter.
type OwnElements = HashMap<usize, TensorData>;

/// The same, on their way to the host or there.
pub(super) type OwnReads = HashMap<usize, HostRead>;

impl Unit {
    /// Gathers those of the unit's parameters that are in `reads`, this rank's shards, from the
    /// shards of all ranks, each in its type. `at` is part of labels.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Read`]; those of the group.
    pub(super) fn gather(
        &self,
        layout: &Layout,
        reads: OwnReads,
        at: &str,
        ranks: &mut Collectives,
    ) -> Result<Gathered, ZeroError> {
        let own = reads.into_iter().map(|(parameter, read)| {
            let path = &layout.parameters()[parameter].path;
            let own = read.wait();
            let own = own.map_err(|error| not_read("this rank's shard", path, &error))?;
            Ok::<_, ZeroError>((parameter, own))
        });
        let own: OwnElements = own.collect::<Result<_, _>>()?;
        let widened: HashMap<usize, Cow<'_, [f32]>> = own
            .iter()
            .map(|(parameter, own)| (*parameter, widened(own)))
            .collect();
        let zeros = |&parameter: &usize| {
            (
                parameter,
                vec![0.0; layout.parameters()[parameter].elements()],
            )
        };
        let mut whole: HashMap<usize, Vec<f32>> = own.keys().map(zeros).collect();
        for (number, (dtype, bucket)) in self.buckets(layout, &own).into_iter().enumerate() {
            let part = layout.own_part(&bucket, |parameter| Some(&*widened[&parameter]));
            let part = HostBuffer::from_f32(dtype, part);
            let label = format!("unit `{}`, part {number}, {at}", self.path);
            let split = Split::Counts(bucket.counts());
            let parts = ranks.all_gather_parts(&label, part, split)?;
            for segment in bucket.segments() {
                let parameter = whole.get_mut(&segment.parameter);
                let parameter = parameter.expect("a unit's buckets have its parameters only");
                let to = &mut parameter[segment.range.clone()];
                parts.read(segment.owner, bucket.in_part(segment), to);
            }
        }
        let tensor = |(parameter, elements): (usize, Vec<f32>)| {
            let data = TensorData::new(elements, layout.parameters()[parameter].shape.clone());
            // Each use shares it.
            (parameter, shared(data.convert_dtype(own[&parameter].dtype)))
        };
        Ok(whole.into_iter().map(tensor).collect())
    }

    /// The buckets in which the unit is gathered, each with its type.
    fn buckets(&self, layout: &Layout, own: &OwnElements) -> Vec<(BufferDtype, Bucket)> {
        let sent_in = |parameter: &usize| exchanged(own.get(parameter)?.dtype);
        let all = [BufferDtype::F32, BufferDtype::Bf16, BufferDtype::F16].into_iter();
        let buckets = all.flat_map(|dtype| {
            let parameters = self.parameters.iter().copied();
            let parameters = parameters.filter(|parameter| sent_in(parameter) == Some(dtype));
            let buckets = layout.map().fill(parameters).into_iter();
            buckets.map(move |bucket| (dtype, bucket))
        });
        buckets.collect()
    }
}

/// The units of a model's sharded parameters, by number. All versions of the model share it.
pub(crate) struct Units {
    /// Where shards are.
    memory: Memory,
    pub(super) all: Vec<Arc<Unit>>,
    /// The unit of each parameter.
    of: Vec<usize>,
    /// The places of the parameters in the order of uploads.
    places: Vec<UploadPlace>,
    order: Mutex<Order>,
}

impl Units {
    /// The units of the parameters of `layout`, with shards in this memory. `unit` returns the name
    /// of the unit of a parameter, by its path.
    pub(crate) fn new(layout: &Layout, memory: Memory, unit: impl Fn(&str) -> String) -> Self {
        let mut members: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (parameter, known) in layout.parameters().iter().enumerate() {
            members
                .entry(unit(&known.path))
                .or_default()
                .push(parameter);
        }
        let mut of = vec![0; layout.parameters().len()];
        let all = members
            .into_iter()
            .enumerate()
            .map(|(unit, (path, parameters))| {
                for &parameter in &parameters {
                    of[parameter] = unit;
                }
                Arc::new(Unit { path, parameters })
            });
        let uploads = UploadOrder::new();
        let places = layout.parameters().iter().map(|_| uploads.place());
        Self {
            all: all.collect(),
            places: places.collect(),
            memory,
            of,
            order: Mutex::default(),
        }
    }

    /// Where shards are.
    pub(super) fn memory(&self) -> Memory {
        self.memory
    }

    /// The unit of a parameter.
    pub(super) fn of(&self, parameter: usize) -> usize {
        self.of[parameter]
    }

    /// The place of a parameter in the order of uploads.
    pub(super) fn place(&self, parameter: usize) -> &UploadPlace {
        &self.places[parameter]
    }

    /// Begins a step.
    pub(super) fn begin(&self) {
        self.order.lock().begin();
    }

    /// By parameter: the type in which it is gathered from this step on where a cast uses it, if
    /// that is not its own.
    pub(super) fn low_types(&self, layout: &Layout) -> Vec<Option<DType>> {
        let order = self.order.lock();
        let known = layout.parameters().iter().enumerate();
        let low = known.map(|(parameter, known)| {
            let low = order.types.get(&parameter).copied();
            low.filter(|_| known.dtype == DType::F32)
        });
        low.collect()
    }

    /// Notes that a parameter is cast to a type, if it can be sent in that.
    pub(super) fn is_cast(&self, parameter: usize, dtype: DType) {
        if exchanged(dtype).is_none() {
            return;
        }
        let mut order = self.order.lock();
        if order.steps == 0 {
            order.types.entry(parameter).or_insert(dtype);
        }
    }

    /// Notes that a parameter is used in its own type, without a cast. Uses after the second step
    /// are exceptions, such as reads.
    pub(super) fn is_used_whole(&self, parameter: usize) {
        let mut order = self.order.lock();
        if order.steps == 1 {
            order.types.remove(&parameter);
        }
    }

    /// The unit that is expected after this one, which is used now.
    pub(super) fn next(&self, unit: usize) -> Option<usize> {
        self.order.lock().next(unit)
    }
}

/// The order in which the first step used units. The unit that is expected next depends on uses
/// alone, which are the same on all ranks: each use is a collective, or reads a unit that a
/// collective has gathered.
#[derive(Default)]
struct Order {
    /// Of the first step.
    units: Vec<usize>,
    /// From the second step on.
    expected: UseOrder<usize>,
    /// By parameter: the type that the first step has cast it to, unless the second step has used
    /// it in its own too.
    types: HashMap<usize, DType>,
    /// Number of steps that have ended.
    steps: usize,
}

/// More than those of a step.
const MOST_USES: usize = 1 << 16;

impl Order {
    fn begin(&mut self) {
        if self.steps == 0 && !self.units.is_empty() {
            self.expected.expect(std::mem::take(&mut self.units));
            self.steps = 1;
        } else if self.steps > 0 {
            self.expected.begin();
            self.steps += 1;
        }
    }

    fn next(&mut self, unit: usize) -> Option<usize> {
        if self.steps > 0 {
            return self.expected.next(unit);
        }
        // A program without steps uses units without end.
        if self.units.len() < MOST_USES {
            self.units.push(unit);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used_without_a_step_is_not_remembered_without_end() {
        let mut order = Order::default();
        (0..3 * MOST_USES).for_each(|use_| assert_eq!(order.next(use_ % 2), None));
        assert_eq!(order.units.len(), MOST_USES);
    }
}
