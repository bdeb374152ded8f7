//! The map from elements to ranks, and the buckets that it cuts.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use serde::{Deserialize, Serialize};

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
        let path = path.into();
        Self { path, elements }
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

/// A range of a parameter in a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub range: Range<usize>,
    /// Offset of the first in the bucket.
    pub start: usize,
}

impl Segment {
    /// Where the elements are in the bucket.
    pub fn in_bucket(&self) -> Range<usize> {
        self.start..self.start + self.range.len()
    }

    /// What of it is in a part of the bucket.
    fn within(&self, part: &Range<usize>) -> Option<Self> {
        let whole = self.in_bucket();
        let at = whole.start.max(part.start)..whole.end.min(part.end);
        let first = self.range.start + at.start.saturating_sub(whole.start);
        (!at.is_empty()).then(|| Self {
            parameter: self.parameter,
            range: first..first + at.len(),
            start: at.start,
        })
    }
}

/// The elements that are reduced or gathered in one call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    segments: Vec<Segment>,
    /// Where each rank's part starts, and the end.
    offsets: Vec<usize>,
}

impl Bucket {
    /// The parameters' ranges, in the order in which they lie in the bucket, without gaps.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Elements of parameters.
    pub fn elements(&self) -> usize {
        self.segments.last().map_or(0, |last| last.in_bucket().end)
    }

    /// Elements of parameters and padding: what is sent.
    pub fn padded_elements(&self) -> usize {
        self.offsets[self.offsets.len() - 1]
    }

    /// Elements that belong to no parameter.
    pub fn padding(&self) -> usize {
        self.padded_elements() - self.elements()
    }

    /// A rank's part of the bucket, padding included.
    pub fn part(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// Length of each rank's part, for [`Split::Counts`](crate::group::Split::Counts).
    pub fn counts(&self) -> Vec<usize> {
        let parts = self.offsets.windows(2);
        parts.map(|part| part[1] - part[0]).collect()
    }

    /// The segments in a part of the bucket, cut to it.
    pub fn segments_in(&self, part: Range<usize>) -> impl Iterator<Item = Segment> {
        let segments = self.segments.iter();
        segments.filter_map(move |segment| segment.within(&part))
    }

    /// Puts segments, each with its owner, in the order of owners, one part an owner.
    pub(super) fn by_owner(mut owned: Vec<(usize, Segment)>, world_size: usize) -> Self {
        owned.sort_by_key(|(owner, _)| *owner);
        let mut offsets = vec![0; world_size + 1];
        let mut end = 0;
        for (owner, segment) in &mut owned {
            segment.start = end;
            end += segment.range.len();
            offsets[*owner + 1..].fill(end);
        }
        let segments = owned.into_iter().map(|(_, segment)| segment).collect();
        Self { segments, offsets }
    }
}

/// Fills buckets with ranges of parameters, one after the other.
pub(super) struct Fill {
    capacity: usize,
    pub buckets: Vec<Vec<(usize, Segment)>>,
    filled: usize,
}

impl Fill {
    pub fn new(capacity: usize) -> Self {
        Self {
            capacity,
            buckets: Vec::new(),
            filled: capacity,
        }
    }

    /// Adds a range, cut where a bucket is full; each segment gets the `owner`.
    pub fn add(&mut self, owner: usize, parameter: usize, mut range: Range<usize>) {
        while !range.is_empty() {
            if self.filled == self.capacity {
                self.buckets.push(Vec::new());
                self.filled = 0;
            }
            let start = self.filled;
            let end = range.start + range.len().min(self.capacity - start);
            let segment = Segment {
                parameter,
                range: range.start..end,
                start,
            };
            self.filled += segment.range.len();
            range.start = end;
            self.buckets
                .last_mut()
                .expect("one is open")
                .push((owner, segment));
        }
    }
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
    /// Position of each parameter's first element with all parameters laid end to end, and the end.
    offsets: Vec<usize>,
    bucket_elements: usize,
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
        Self::new(Partition::Flat, parameters, world_size, bucket_elements)
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
        Self::new(Partition::Whole, parameters, world_size, bucket_elements)
    }

    pub(crate) fn new(
        partition: Partition,
        parameters: Vec<Parameter>,
        world_size: usize,
        mut bucket_elements: usize,
    ) -> Result<Self, ZeroError> {
        let sizes = [
            ("world_size", world_size),
            ("bucket_elements", bucket_elements),
        ];
        if let Some((setting, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
            return Err(ZeroError::invalid(setting, 0, "at least 1"));
        }
        let mut offsets = vec![0_usize];
        for Parameter { path, elements } in &parameters {
            let end = offsets[offsets.len() - 1].checked_add(*elements);
            offsets.push(end.ok_or_else(|| ZeroError::TooManyElements {
                what: format!("the parameters up to {path}"),
            })?);
        }
        let owners = match partition {
            Partition::Whole => owners(&parameters, world_size),
            Partition::Flat => {
                bucket_elements = bucket_elements.max(world_size) / world_size * world_size;
                vec![0; parameters.len()]
            }
        };
        let mut fill = Fill::new(bucket_elements);
        for (index, parameter) in parameters.iter().enumerate() {
            fill.add(owners[index], index, 0..parameter.elements);
        }
        let buckets = fill.buckets.into_iter().map(|owned| {
            let mut bucket = Bucket::by_owner(owned, world_size);
            if partition == Partition::Flat {
                let part = bucket.elements().div_ceil(world_size);
                bucket.offsets = (0..=world_size).map(|rank| rank * part).collect();
            }
            bucket
        });
        Ok(Self {
            buckets: buckets.collect(),
            partition,
            world_size,
            parameters,
            offsets,
            bucket_elements,
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
        self.offsets[self.parameters.len()]
    }

    /// The buckets, in the order of the parameters. During backward gradients may be reduced in other buckets: see
    /// [`ReducePlan`](super::ReducePlan).
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The buckets of a parameter, by index, with its segment in each, in the order of its elements. Costs a search through the
    /// segments of each of these buckets.
    pub fn segments(&self, parameter: usize) -> impl Iterator<Item = (usize, &Segment)> {
        let (start, end) = (self.offsets[parameter], self.offsets[parameter + 1]);
        let of_parameter = start / self.bucket_elements..end.div_ceil(self.bucket_elements);
        of_parameter.filter_map(move |index| {
            let mut segments = self.buckets.get(index)?.segments.iter();
            Some((
                index,
                segments.find(|segment| segment.parameter == parameter)?,
            ))
        })
    }

    /// Most elements of a bucket.
    pub fn bucket_elements(&self) -> usize {
        self.bucket_elements
    }

    /// Who owns which elements of a parameter, in their order.
    pub fn owners(&self, parameter: usize) -> Vec<(usize, Range<usize>)> {
        let mut owners = Vec::new();
        for (bucket, segment) in self.segments(parameter) {
            let part = |rank| segment.within(&self.buckets[bucket].part(rank));
            let owned = (0..self.world_size).filter_map(|rank| Some((rank, part(rank)?.range)));
            owners.extend(owned);
        }
        owners
    }

    /// Length of a rank's shard, padding included.
    pub fn shard_elements(&self, rank: usize) -> usize {
        let buckets = self.buckets.iter();
        buckets.map(|bucket| bucket.part(rank).len()).sum()
    }

    /// Elements of a rank's shard that belong to no parameter.
    pub fn padding(&self, rank: usize) -> usize {
        let owned = self.pieces(rank);
        let owned: usize = owned.iter().map(|owned| owned.range.len()).sum();
        self.shard_elements(rank) - owned
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
        let mut all: Vec<OwnedRange> = Vec::new();
        for (bucket, shard) in self.buckets.iter().zip(self.shard_ranges(rank)) {
            let part = bucket.part(rank);
            for Segment {
                parameter,
                range,
                start,
            } in bucket.segments_in(part.clone())
            {
                let shard_start = shard.start + (start - part.start);
                match all.last_mut() {
                    Some(last)
                        if (last.parameter, last.range.end) == (parameter, range.start)
                            && last.in_shard().end == shard_start =>
                    {
                        last.range.end = range.end;
                    }
                    _ => all.push(OwnedRange {
                        parameter,
                        range,
                        shard_start,
                    }),
                }
            }
        }
        all
    }
}

/// The owner of each whole parameter: the largest first, each to the rank with the fewest elements (Graham's LPT rule, within 4/3 of
/// the optimum). Ties are broken by position and by rank, so that all ranks compute the same owners.
fn owners(parameters: &[Parameter], world_size: usize) -> Vec<usize> {
    let mut largest_first: Vec<usize> = (0..parameters.len()).collect();
    largest_first.sort_by_key(|&index| (Reverse(parameters[index].elements), index));
    let mut least_loaded: BinaryHeap<_> = (0..world_size).map(|rank| Reverse((0, rank))).collect();
    let mut owners = vec![0; parameters.len()];
    for index in largest_first {
        if let Some(Reverse((load, rank))) = least_loaded.pop() {
            owners[index] = rank;
            least_loaded.push(Reverse((load + parameters[index].elements, rank)));
        }
    }
    owners
}
