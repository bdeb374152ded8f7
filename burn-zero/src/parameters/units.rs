//! Units: parameters that are gathered together, and the order in which they are used.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use burn::tensor::{DType, TensorData};
use parking_lot::Mutex;

use crate::ZeroError;
use crate::group::{BufferDtype, Collectives, HostBuffer, Split};
use crate::host::{exchanged, floats};
use crate::reduce::Layout;
use crate::shard::Bucket;

/// Elements of this rank's shard of a parameter, in f32.
pub(crate) type Shard = Arc<Vec<f32>>;

/// All elements of a unit's parameters, by parameter.
pub(crate) type Gathered = HashMap<usize, TensorData>;

/// Parameters that are gathered together: by default those of a repeated block, such as `blocks.0`, or all that are in none.
pub(crate) struct Unit {
    /// By default the path of the block; empty for the unit of all others.
    pub(super) path: String,
    pub(super) parameters: Vec<usize>,
}

/// This rank's shards of the parameters that are gathered in another type than their own, in that type; by parameter.
pub(super) type Rounded = HashMap<usize, Arc<TensorData>>;

/// The type in which a parameter is gathered.
fn gathered_in(layout: &Layout, rounded: &Rounded, parameter: usize) -> DType {
    let own = layout.parameters()[parameter].dtype;
    rounded.get(&parameter).map_or(own, |rounded| rounded.dtype)
}

impl Unit {
    /// Gathers the unit's parameters from the shards of all ranks, `own` on this one: the `rounded` ones in the types they are rounded to, the
    /// others in their own. `at` is part of labels.
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
    ) -> Result<Gathered, ZeroError> {
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
            (parameter, data.convert_dtype(dtype))
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
        Self {
            all: all.collect(),
            of,
            layout: layout.clone(),
            order: Mutex::default(),
        }
    }

    /// The unit of a parameter.
    pub(super) fn of(&self, parameter: usize) -> usize {
        self.of[parameter]
    }

    /// Begins a step.
    pub(super) fn begin(&self) {
        let mut order = self.order.lock();
        order.steps += usize::from(!order.units.is_empty());
        (order.at, order.last) = (0, None);
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

    /// Notes that a parameter is used in its own type, without a cast. Uses after the second step are exceptions, such as reads.
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

/// The order in which the first step used units. The unit that is expected next depends on uses alone, which are the same on all ranks:
/// each use is a collective, or reads a unit that a collective has gathered.
#[derive(Default)]
struct Order {
    units: Vec<usize>,
    /// By parameter: the type that the first step has cast it to, unless the second step has used it in its own too.
    types: HashMap<usize, DType>,
    /// Number of steps that have ended.
    steps: usize,
    /// Where in `units` the next use is expected.
    at: usize,
    last: Option<usize>,
}

/// More than those of a step.
const MOST_USES: usize = 1 << 16;

impl Order {
    fn next(&mut self, unit: usize) -> Option<usize> {
        if self.steps == 0 {
            // A program without steps uses units without end.
            if self.units.len() < MOST_USES {
                self.units.push(unit);
            }
            return None;
        }
        let last = self.last.replace(unit);
        let (units, expected) = (&self.units, self.at);
        // The expected place or, where another order begins (validation, a second micro-batch), one after the same previous unit.
        let follows = |at: &usize| {
            let before = at.checked_sub(1).map(|before| units[before]);
            units[*at] == unit && (*at == expected || before == last)
        };
        let mut places = (expected..units.len()).chain(0..expected);
        let place = places.find(follows);
        let place = place.or_else(|| units.iter().position(|used| *used == unit));
        self.at = place.map_or(units.len(), |place| place + 1);
        units.get(self.at).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is expected after each use.
    fn expected(of_first_step: &[usize], used: &[usize]) -> Vec<Option<usize>> {
        let mut order = Order {
            units: of_first_step.to_vec(),
            steps: 1,
            ..Order::default()
        };
        used.iter().map(|unit| order.next(*unit)).collect()
    }

    const STEP: [usize; 6] = [0, 1, 2, 3, 2, 1];

    #[test]
    fn a_step_like_the_first_is_expected_whole() {
        let next = STEP.iter().skip(1).map(|unit| Some(*unit));
        let next: Vec<_> = next.chain([None]).collect();
        assert_eq!(expected(&STEP, &STEP), next);
    }

    #[test]
    fn so_is_a_second_micro_batch() {
        let twice = [STEP, STEP].concat();
        let found = expected(&STEP, &twice);
        assert_eq!(found[..6], found[6..]);
    }

    #[test]
    fn validation_misses_once_a_batch() {
        let found = expected(&STEP, &[0, 1, 2, 3, 0, 1, 2, 3, 0]);
        let expected = [1, 2, 3, 2, 1, 2, 3, 2, 1].map(Some);
        assert_eq!(found, expected);
    }

    #[test]
    fn what_is_used_without_a_step_is_not_remembered_without_end() {
        let mut order = Order::default();
        (0..3 * MOST_USES).for_each(|use_| assert_eq!(order.next(use_ % 2), None));
        assert_eq!(order.units.len(), MOST_USES);
    }

    #[test]
    fn a_unit_that_the_first_step_did_not_use_is_before_nothing() {
        assert_eq!(expected(&STEP, &[0, 7, 2]), [Some(1), None, Some(3)]);
    }
}
