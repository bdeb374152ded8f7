//! Units: parameters that are gathered together.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use burn::tensor::{DType, TensorData};
use burn_checkpoint::{UploadOrder, UploadPlace};
use burn_decorator::{HostRead, shared};
use burn_ranks::shard::Bucket;
use burn_ranks::{BufferDtype, Collectives, HostBuffer, Split};
use parking_lot::RwLock;

use crate::error::ZeroError;
use crate::host::{exchanged, not_read, widened};
use crate::reduce::Layout;
use crate::settings::Memory;

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
            let data = read
                .wait()
                .map_err(|error| not_read("this rank's shard", path, &error))?;
            Ok::<_, ZeroError>((parameter, data))
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
            let own = layout.own_part(&bucket, |parameter| Some(&*widened[&parameter]));
            let part = HostBuffer::from_f32(dtype, own);
            let label = format!("unit `{}`, part {number}, {at}", self.path);
            let split = Split::Counts(bucket.counts());
            let parts = ranks.all_gather_parts(&label, part, split)?;
            for segment in bucket.segments() {
                let parameter = whole
                    .get_mut(&segment.parameter)
                    .expect("a unit's buckets have its parameters only");
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
            let of_type = |parameter: &usize| sent_in(parameter) == Some(dtype);
            let parameters = self.parameters.iter().copied().filter(of_type);
            let filled = layout.map().fill(parameters).into_iter();
            filled.map(move |bucket| (dtype, bucket))
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
    /// By parameter: the type in which it is gathered where a cast uses it, if that is not its own.
    /// The same for all versions: a clone of the model that stays as it is, such as the reference
    /// model of DPO, computes what the trained one does.
    low_types: RwLock<Vec<Option<DType>>>,
    /// Steps of the trained model.
    steps: AtomicUsize,
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
            low_types: RwLock::new(vec![None; of.len()]),
            memory,
            of,
            steps: AtomicUsize::new(0),
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

    /// The type in which a parameter is gathered where a cast uses it, if that is not its own.
    pub(super) fn low_type(&self, parameter: usize) -> Option<DType> {
        self.low_types.read()[parameter]
    }

    /// From now on parameters are gathered in these types. All ranks call it between the same
    /// gathers.
    pub(super) fn set_low_types(&self, low_types: Vec<Option<DType>>) {
        *self.low_types.write() = low_types;
    }

    /// Counts a step of the trained model, and returns its number.
    pub(super) fn count_step(&self) -> usize {
        self.steps.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Number of the last step.
    pub(super) fn steps(&self) -> usize {
        self.steps.load(Ordering::Relaxed)
    }
}
