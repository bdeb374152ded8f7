//! The parameters, the elements of them that this rank holds, and the names of collectives.

use core::ops::Range;
use std::sync::Arc;

use burn_backend::DType;
use burn_ranks::shard::{self, Bucket};
use burn_ranks::{BufferDtype, Partition, ShardMap};

use crate::error::ZeroError;
use crate::host::exchanged;
use crate::settings::{Stage, ZeroSettings};

/// A parameter with its shape and type, the same on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ParameterSpec {
    /// Its path in the module, such as `blocks.0.mlp.weight`.
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

impl ParameterSpec {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size of the parameter, and of its gradient.
    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The shape of a shard of `elements`: as many dimensions as the parameter has, so that a
    /// tensor of its type can hold it.
    pub(crate) fn shard_shape(&self, elements: usize) -> Vec<usize> {
        let mut shape = vec![1; self.shape.len()];
        if let Some(last) = shape.last_mut() {
            *last = elements;
        }
        shape
    }
}

/// All parameters in the order of the module, and the shard of one rank.
#[derive(Debug)]
pub(crate) struct Layout {
    parameters: Vec<ParameterSpec>,
    map: ShardMap,
    rank: usize,
    /// By parameter: the elements of this rank's shard, ascending.
    shard: Vec<Vec<Range<usize>>>,
    /// Whether the rank holds all elements, whatever its shard is.
    holds_all: bool,
}

impl Layout {
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for buckets of 0 elements.
    pub(crate) fn new(
        parameters: Vec<ParameterSpec>,
        world_size: usize,
        rank: usize,
        settings: &ZeroSettings,
    ) -> Result<Self, ZeroError> {
        let map = ShardMap::new(
            settings.partition,
            sizes(&parameters),
            world_size,
            settings.bucket_elements,
        )?;
        Ok(Self {
            parameters,
            shard: map.shard(rank),
            map,
            rank,
            holds_all: settings.stage == Stage::DataParallel || world_size == 1,
        })
    }

    /// The parameters of this layout with their shards, and after them `frozen`, of which each rank
    /// has a part of the same length: all that is gathered in units.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for more elements than `usize` counts.
    pub(crate) fn with_frozen(&self, frozen: Vec<ParameterSpec>) -> Result<Self, ZeroError> {
        let map = self.map.with_balanced(sizes(&frozen))?;
        let mut parameters = self.parameters.clone();
        parameters.extend(frozen);
        Ok(Self {
            parameters,
            shard: map.shard(self.rank),
            map,
            ..*self
        })
    }

    /// The map from elements to ranks.
    pub(crate) fn map(&self) -> &ShardMap {
        &self.map
    }

    /// The rank of this shard.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn parameters(&self) -> &[ParameterSpec] {
        &self.parameters
    }

    /// Whether this rank holds all elements of all parameters.
    pub(crate) fn holds_all(&self) -> bool {
        self.holds_all
    }

    /// The elements of a parameter in this rank's shard, ascending.
    pub(crate) fn shard(&self, parameter: usize) -> &[Range<usize>] {
        &self.shard[parameter]
    }

    /// By rank, the elements of each parameter in its shard.
    pub(crate) fn cuts(&self) -> Vec<Vec<Vec<Range<usize>>>> {
        let ranks = 0..self.map.world_size();
        ranks.map(|rank| self.map.shard(rank)).collect()
    }

    /// How many elements of a parameter this rank holds.
    pub(crate) fn held(&self, parameter: usize) -> usize {
        if self.holds_all {
            self.parameters[parameter].elements()
        } else {
            self.shard[parameter].iter().map(Range::len).sum()
        }
    }

    /// The shape of this rank's shard of a parameter for the optimizer.
    pub(crate) fn shard_shape(&self, parameter: usize) -> Vec<usize> {
        match self.map.partition() {
            Partition::Flat => vec![self.held(parameter)],
            Partition::Whole => self.parameters[parameter].shape.clone(),
        }
    }

    /// The offset of an element of a parameter in this rank's shard of the parameter.
    pub(crate) fn position(&self, parameter: usize, element: usize) -> usize {
        if self.holds_all {
            return element;
        }
        let mut before = 0;
        for range in &self.shard[parameter] {
            if range.contains(&element) {
                return before + element - range.start;
            }
            before += range.len();
        }
        unreachable!("element {element} of parameter {parameter} is in the shard of another rank")
    }

    /// This rank's part of a bucket. `own` returns the rank's elements of a parameter; the part is
    /// zeros where it returns `None`.
    pub(crate) fn own_part<'a>(
        &self,
        bucket: &Bucket,
        own: impl Fn(usize) -> Option<&'a [f32]>,
    ) -> Vec<f32> {
        let mut part = vec![0.0; bucket.part(self.rank).len()];
        let segments = bucket.segments().iter();
        for segment in segments.filter(|segment| segment.owner == self.rank) {
            let Some(own) = own(segment.parameter) else {
                continue;
            };
            let from = self.position(segment.parameter, segment.range.start);
            let own = &own[from..from + segment.range.len()];
            part[bucket.in_part(segment)].copy_from_slice(own);
        }
        part
    }

    /// The narrowest type that holds a bucket's parameters exactly.
    pub(crate) fn dtype(&self, bucket: &Bucket) -> BufferDtype {
        let segments = bucket.segments().iter();
        let mut dtypes = segments.map(|segment| self.parameters[segment.parameter].dtype);
        let first = dtypes
            .next()
            .filter(|first| dtypes.all(|other| other == *first));
        first.and_then(exchanged).unwrap_or(BufferDtype::F32)
    }

    /// The name of a bucket in labels. The step tag comes before the paths, because long labels are
    /// cut at the end.
    pub(crate) fn bucket_name(&self, number: usize, bucket: &Bucket, at: &StepTag) -> String {
        let parameters = bucket.segments().iter().map(|segment| segment.parameter);
        let ends = [parameters.clone().min(), parameters.max()];
        let [first, last] = ends.map(|end| end.map_or("", |end| &self.parameters[end].path));
        format!("bucket {number}, {at} ({first} to {last})")
    }
}

/// The backward pass or step that a collective belongs to, such as `step 3, lr 0.1`: part of its
/// label, so that ranks that differ in it stop with both labels in the error. Costs no additional
/// message.
pub(crate) type StepTag = Arc<str>;

/// Parameters as [`ShardMap`] takes them.
fn sizes(parameters: &[ParameterSpec]) -> Vec<shard::Parameter> {
    let sized = |it: &ParameterSpec| shard::Parameter::new(&*it.path, it.elements());
    parameters.iter().map(sized).collect()
}
