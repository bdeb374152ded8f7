//! The map from elements to ranks.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Bucket, Segment, bucket, whole};
use crate::ZeroError;

/// A parameter as sharding needs it: path and size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parameter {
    /// Path in the module, such as `blocks.0.mlp.weight`.
    pub path: String,
    /// Number of elements; may be 0.
    pub elements: usize,
}

impl Parameter {
    /// A parameter.
    pub fn new(path: impl Into<String>, elements: usize) -> Self {
        Self {
            path: path.into(),
            elements,
        }
    }
}

/// How elements are assigned to ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Partition {
    /// Equal parts of every bucket, through parameters.
    Flat,
    /// Whole parameters, balanced by size.
    Whole,
}

/// Which rank owns which elements, for one list of parameters and one world size.
///
/// ```
/// use burn_zero::shard::{Parameter, ShardMap};
///
/// let parameters = vec![Parameter::new("weight", 10), Parameter::new("bias", 3)];
/// let map = ShardMap::flat(parameters, 4, 8)?; // buckets of 8 elements
/// assert_eq!(map.buckets()[0].part(1), 2..4);
/// let owned: Vec<_> = map.pieces(0).iter().map(|piece| (piece.parameter, piece.range.clone())).collect();
/// assert_eq!(owned, [(0, 0..2), (0, 8..10)]); // of "weight", from both buckets
/// assert_eq!((map.shard_elements(3), map.padding(3)), (4, 2)); // the second bucket has 5 elements for 4 ranks
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMap {
    partition: Partition,
    world_size: usize,
    parameters: Vec<Parameter>,
    /// Position of each parameter's first element with all parameters laid end to end.
    global_offsets: Vec<usize>,
    elements: usize,
    capacity: usize,
    buckets: Vec<Bucket>,
}

/// A range of a parameter that a rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRange {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub range: Range<usize>,
    /// Offset of the first in the rank's shard.
    pub shard_start: usize,
}

impl OwnedRange {
    /// Where the elements are in the rank's shard.
    pub fn in_shard(&self) -> Range<usize> {
        self.shard_start..self.shard_start + self.range.len()
    }
}

impl ShardMap {
    /// Equal parts of buckets of at most `bucket_elements`, or `world_size` if that is more.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for no ranks or empty buckets; [`ZeroError::TooManyElements`].
    pub fn flat(
        parameters: Vec<Parameter>,
        world_size: usize,
        bucket_elements: usize,
    ) -> Result<Self, ZeroError> {
        check(world_size, bucket_elements)?;
        let capacity = bucket_elements.max(world_size) / world_size * world_size;
        let cut = |segments| Bucket::cut_equally(segments, world_size);
        Self::new(Partition::Flat, parameters, world_size, capacity, cut)
    }

    /// Whole parameters, in buckets of at most `bucket_elements`.
    ///
    /// # Errors
    ///
    /// Those of [`flat`](Self::flat).
    pub fn whole(
        parameters: Vec<Parameter>,
        world_size: usize,
        bucket_elements: usize,
    ) -> Result<Self, ZeroError> {
        check(world_size, bucket_elements)?;
        global_offsets(&parameters)?;
        let owners = whole::owners(&parameters, world_size);
        let cut = |segments: Vec<Segment>| {
            let owned = segments.into_iter();
            let owned = owned.map(|segment| (owners[segment.parameter], segment));
            Bucket::cut_by_owner(owned.collect(), world_size)
        };
        Self::new(
            Partition::Whole,
            parameters,
            world_size,
            bucket_elements,
            cut,
        )
    }

    fn new(
        partition: Partition,
        parameters: Vec<Parameter>,
        world_size: usize,
        capacity: usize,
        cut: impl Fn(Vec<Segment>) -> Bucket,
    ) -> Result<Self, ZeroError> {
        let (global_offsets, elements) = global_offsets(&parameters)?;
        let buckets = bucket::fill(&parameters, capacity)
            .into_iter()
            .map(cut)
            .collect();
        Ok(Self {
            partition,
            world_size,
            parameters,
            global_offsets,
            elements,
            capacity,
            buckets,
        })
    }

    /// How elements are assigned to ranks.
    pub fn partition(&self) -> Partition {
        self.partition
    }

    /// Number of ranks.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// The parameters, in their order.
    pub fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// Elements of all parameters, without padding.
    pub fn elements(&self) -> usize {
        self.elements
    }

    /// The buckets, in the order of the parameters. During backward gradients may be reduced in other buckets: see
    /// [`ReducePlan`](super::ReducePlan).
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The buckets of a parameter, by index, with its segment in each, in the order of its elements. Costs a search through the
    /// segments of each of these buckets.
    pub fn segments(&self, parameter: usize) -> impl Iterator<Item = (usize, &Segment)> {
        let start = self.global_offsets[parameter];
        let end = start + self.parameters[parameter].elements;
        (start / self.capacity..end.div_ceil(self.capacity)).filter_map(move |index| {
            let segments = self.buckets.get(index)?.segments();
            Some((
                index,
                segments
                    .iter()
                    .find(|segment| segment.parameter == parameter)?,
            ))
        })
    }

    /// Most elements of a bucket.
    pub fn bucket_elements(&self) -> usize {
        self.capacity
    }

    /// Who owns which elements of a parameter, in their order.
    pub fn owners(&self, parameter: usize) -> Vec<(usize, Range<usize>)> {
        let mut owners = Vec::new();
        for (bucket, segment) in self.segments(parameter) {
            let (bucket, at) = (&self.buckets[bucket], segment.in_bucket());
            for rank in 0..self.world_size {
                let part = bucket.part(rank);
                let (start, end) = (at.start.max(part.start), at.end.min(part.end));
                if start < end {
                    let first = segment.range.start + (start - at.start);
                    owners.push((rank, first..first + (end - start)));
                }
            }
        }
        owners
    }

    /// Length of a rank's shard, padding included.
    pub fn shard_elements(&self, rank: usize) -> usize {
        self.buckets
            .iter()
            .map(|bucket| bucket.part(rank).len())
            .sum()
    }

    /// Elements of a rank's shard that belong to no parameter.
    pub fn padding(&self, rank: usize) -> usize {
        self.shard_elements(rank)
            - self
                .pieces(rank)
                .iter()
                .map(|piece| piece.range.len())
                .sum::<usize>()
    }

    /// Where each bucket's part lies in a rank's shard, in the order of buckets.
    pub fn shard_ranges(&self, rank: usize) -> Vec<Range<usize>> {
        let mut end = 0;
        let range = |bucket: &Bucket| {
            let start = end;
            end += bucket.part(rank).len();
            start..end
        };
        self.buckets.iter().map(range).collect()
    }

    /// The ranges that a rank owns, in the order of its shard; ranges adjacent in both parameter and shard are merged. Costs a pass
    /// over all segments of all buckets: keep the result.
    pub fn pieces(&self, rank: usize) -> Vec<OwnedRange> {
        let mut pieces: Vec<OwnedRange> = Vec::new();
        for (bucket, shard) in self.buckets.iter().zip(self.shard_ranges(rank)) {
            let part = bucket.part(rank);
            for segment in bucket.segments_in(part.clone()) {
                let owned = OwnedRange {
                    parameter: segment.parameter,
                    range: segment.range,
                    shard_start: shard.start + (segment.start - part.start),
                };
                append(&mut pieces, owned);
            }
        }
        pieces
    }
}

/// Adds a range, merged with the last one if they are adjacent.
fn append(pieces: &mut Vec<OwnedRange>, next: OwnedRange) {
    match pieces.last_mut() {
        Some(last)
            if last.parameter == next.parameter
                && last.range.end == next.range.start
                && last.in_shard().end == next.shard_start =>
        {
            last.range.end = next.range.end;
        }
        _ => pieces.push(next),
    }
}

fn check(world_size: usize, bucket_elements: usize) -> Result<(), ZeroError> {
    for (setting, value) in [
        ("world_size", world_size),
        ("bucket_elements", bucket_elements),
    ] {
        if value == 0 {
            let (value, expected) = (value.to_string(), "at least 1");
            return Err(ZeroError::InvalidSetting {
                setting,
                value,
                expected,
            });
        }
    }
    Ok(())
}

/// The offsets of the parameters laid end to end, and the end.
fn global_offsets(parameters: &[Parameter]) -> Result<(Vec<usize>, usize), ZeroError> {
    let mut end = 0_usize;
    let mut offsets = Vec::with_capacity(parameters.len());
    for parameter in parameters {
        offsets.push(end);
        end = end
            .checked_add(parameter.elements)
            .ok_or_else(|| ZeroError::TooManyElements {
                what: format!("the parameters up to {}", parameter.path),
            })?;
    }
    Ok((offsets, end))
}
