//! Units: parameters that are gathered together, and the order in which they are used.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use burn_checkpoint::{UploadOrder, UploadPlace};
use burn_decorator::{UseOrder, shared};
use burn_ranks::shard::Bucket;
use burn_ranks::{BufferDtype, Collectives, HostBuffer, RanksError, Split};
use parking_lot::Mutex;

use crate::host::{exchanged, floats};
use crate::reduce::Layout;

/// Elements of this rank's shard of a parameter, in f32.
pub(crate) type Shard = Arc<Vec<f32>>;

/// All elements of a unit's parameters, by parameter.
pub(crate) type Gathered = HashMap<usize, TensorData>;

/// Parameters that are gathered together: by default those of a repeated block, such as `blocks.0`,
/// or all that are in none.
pub(crate) struct Unit {
    /// By default the path of the block; empty for the unit of all others.
    pub(super) path: String,
    pub(super) parameters: Vec<usize>,
}

/// This rank's shards of the parameters that are gathered in another type than their own, in that
/// type; by parameter.
pub(super) type Rounded = HashMap<usize, Arc<TensorData>>;

/// The type in which a parameter is gathered.
fn gathered_in(layout: &Layout, rounded: &Rounded, parameter: usize) -> DType {
    let own = layout.parameters()[parameter].dtype;
    rounded.get(&parameter).map_or(own, |rounded| rounded.dtype)
}

impl Unit {
    /// Gathers the unit's parameters from the shards of all ranks, `own` on this one: the `rounded`
    /// ones in the types they are rounded to, the others in their own. `at` is part of labels.
    ///
    /// # Errors
    ///
    /// Those of the group.
    pub(super) fn gather(
        &self,
        layout: &Layout,
        rounded: &Rounded,
        own: &[Shard],
        at: &str,
        ranks: &mut Collectives,
    ) -> Result<Gathered, RanksError> {
        let low = rounded.iter();
        let low = low.map(|(parameter, own)| (*parameter, floats(TensorData::clone(own))));
        let low: HashMap<usize, Vec<f32>> = low.collect();
        let zeros = |&parameter: &usize| {
            (
                parameter,
                vec![0.0; layout.parameters()[parameter].elements()],
            )
        };
        let mut whole: HashMap<usize, Vec<f32>> = self.parameters.iter().map(zeros).collect();
        for (number, (dtype, bucket)) in self.buckets(layout, rounded).into_iter().enumerate() {
            let own = |parameter| {
                let low = low.get(&parameter);
                Some(low.unwrap_or(&own[parameter]).as_slice())
            };
            let part = layout.own_part(&bucket, own);
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
            let dtype = gathered_in(layout, rounded, parameter);
            // Each use shares it.
            (parameter, shared(data.convert_dtype(dtype)))
        };
        Ok(whole.into_iter().map(tensor).collect())
    }

    /// The buckets in which the unit is gathered, each with its type.
    fn buckets(&self, layout: &Layout, rounded: &Rounded) -> Vec<(BufferDtype, Bucket)> {
        let sent_in = |parameter: &usize| exchanged(gathered_in(layout, rounded, *parameter));
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

/// The units of a model, by number.
pub(crate) struct Units {
    pub(super) layout: Arc<Layout>,
    pub(super) all: Vec<Arc<Unit>>,
    /// The unit of each parameter.
    of: Vec<usize>,
    /// The places of the parameters in the order of uploads.
    places: Vec<UploadPlace>,
    order: Mutex<Order>,
}

impl Units {
    /// `unit` returns the name of the unit of a parameter, by its path.
    pub(crate) fn new(layout: &Arc<Layout>, unit: impl Fn(&str) -> String) -> Self {
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
            of,
            layout: layout.clone(),
            order: Mutex::default(),
        }
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

    /// The type in which a parameter is gathered from the next step on, if that is not its own.
    pub(super) fn low_type(&self, parameter: usize) -> Option<DType> {
        self.order.lock().types.get(&parameter).copied()
    }

    /// Notes that a parameter is cast to a type.
    pub(super) fn is_cast(&self, parameter: usize, dtype: DType) {
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
