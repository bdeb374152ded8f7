//! The map from elements to ranks, and the buckets that it cuts.

use std::{cmp::Reverse, collections::BinaryHeap, ops::Range};

use serde::{Deserialize, Serialize};

use super::balanced_offsets;
use crate::{InvalidSetting, RanksError};

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
    /// Equal parts of every bucket, cut through parameters.
    Flat,
    /// Whole parameters, balanced by size.
    Whole,
}

/// A range of a parameter in a bucket, which one rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter.
    pub parameter: usize,
    /// Elements of the parameter.
    pub range: Range<usize>,
    /// The rank that owns them.
    pub owner: usize,
    /// Offset of the first element in the bucket.
    pub start: usize,
}

impl Segment {
    /// Where the elements are in the bucket.
    pub fn in_bucket(&self) -> Range<usize> {
        self.start..self.start + self.range.len()
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
    /// The parameters' ranges, in the order of their owners, in which they lie in the bucket
    /// without gaps.
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

    /// A rank's part of the bucket, padding included.
    pub fn part(&self, rank: usize) -> Range<usize> {
        self.offsets[rank]..self.offsets[rank + 1]
    }

    /// Where the elements of a segment are in its owner's part.
    pub fn in_part(&self, segment: &Segment) -> Range<usize> {
        let (at, part) = (segment.in_bucket(), self.offsets[segment.owner]);
        at.start - part..at.end - part
    }

    /// Length of each rank's part, for [`Split::Counts`](crate::Split::Counts).
    pub fn counts(&self) -> Vec<usize> {
        let parts = self.offsets.windows(2);
        parts.map(|part| part[1] - part[0]).collect()
    }
}

/// Which rank owns which elements, for one list of parameters and one world size.
///
/// ```
/// use burn_ranks::shard::{Parameter, ShardMap};
///
/// let parameters = vec![Parameter::new("weight", 10), Parameter::new("bias", 3)];
/// let map = ShardMap::flat(parameters, 4, 8)?; // buckets of 8 elements
/// assert_eq!(map.buckets()[0].part(1), 2..4);
/// assert_eq!(map.shard(0), [vec![0..2, 8..10], vec![]]); // of "weight", from both buckets; none of "bias"
/// assert_eq!((map.shard_elements(3), map.padding(3)), (4, 2)); // the second bucket has 5 elements for 4 ranks
/// # Ok::<(), burn_ranks::RanksError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardMap {
    partition: Partition,
    world_size: usize,
    parameters: Vec<Parameter>,
    /// Position of each parameter's first element with all parameters laid end to end, and the end.
    offsets: Vec<usize>,
    /// By parameter: the ranges of its elements, in their order, each with its owner.
    owners: Vec<Vec<(usize, Range<usize>)>>,
    bucket_elements: usize,
    buckets: Vec<Bucket>,
}

impl ShardMap {
    /// Equal parts of buckets of at most `bucket_elements`, or `world_size` if that is more.
    ///
    /// # Errors
    ///
    /// [`RanksError::InvalidSetting`] for no ranks, empty buckets, or more elements than `usize`
    /// counts.
    pub fn flat(
        parameters: Vec<Parameter>,
        world_size: usize,
        bucket_elements: usize,
    ) -> Result<Self, RanksError> {
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
    ) -> Result<Self, RanksError> {
        Self::new(Partition::Whole, parameters, world_size, bucket_elements)
    }

    /// As [`flat`](Self::flat) or [`whole`](Self::whole).
    ///
    /// # Errors
    ///
    /// Those of [`flat`](Self::flat).
    pub fn new(
        partition: Partition,
        parameters: Vec<Parameter>,
        world_size: usize,
        mut bucket_elements: usize,
    ) -> Result<Self, RanksError> {
        InvalidSetting::unless(world_size > 0, "world_size", 0, "at least 1")?;
        InvalidSetting::unless(bucket_elements > 0, "bucket_elements", 0, "at least 1")?;
        let mut offsets = vec![0_usize];
        for parameter in &parameters {
            offsets.push(end_after(&offsets, parameter)?);
        }
        let owners = match partition {
            Partition::Whole => owners(&parameters, world_size),
            Partition::Flat => {
                bucket_elements = bucket_elements.max(world_size) / world_size * world_size;
                cuts(&offsets, world_size, bucket_elements)
            }
        };
        let mut map = Self {
            partition,
            world_size,
            parameters,
            offsets,
            owners,
            bucket_elements,
            buckets: Vec::new(),
        };
        map.buckets = map.fill(0..map.parameters.len());
        if partition == Partition::Flat {
            for bucket in &mut map.buckets {
                let part = bucket.elements().div_ceil(world_size);
                bucket.offsets = (0..=world_size).map(|rank| rank * part).collect();
            }
        }
        Ok(map)
    }

    /// The parameters of this map, with the owners that they have here, and after them `more`, each
    /// in parts of equal length: for what is gathered together with the parameters of this map and
    /// changes none of their owners.
    ///
    /// # Errors
    ///
    /// [`RanksError::InvalidSetting`] for more elements than `usize` counts.
    pub fn with_balanced(&self, more: Vec<Parameter>) -> Result<Self, RanksError> {
        let mut all = self.clone();
        for parameter in more {
            all.offsets.push(end_after(&all.offsets, &parameter)?);
            let parts = balanced_offsets(parameter.elements, self.world_size);
            let parts = parts.windows(2).map(|part| part[0]..part[1]).enumerate();
            all.owners
                .push(parts.filter(|(_, part)| !part.is_empty()).collect());
            all.parameters.push(parameter);
        }
        all.buckets = all.fill(0..all.parameters.len());
        Ok(all)
    }

    /// Buckets filled with the elements of `parameters` in this order, each cut into one part an
    /// owner, without padding.
    pub fn fill(&self, parameters: impl Iterator<Item = usize>) -> Vec<Bucket> {
        let mut buckets: Vec<Vec<Segment>> = Vec::new();
        let mut filled = self.bucket_elements;
        for parameter in parameters {
            for (owner, range) in self.owners[parameter].iter().cloned() {
                let (mut start, end) = (range.start, range.end);
                while start < end {
                    if filled == self.bucket_elements {
                        buckets.push(Vec::new());
                        filled = 0;
                    }
                    let stop = start + (end - start).min(self.bucket_elements - filled);
                    filled += stop - start;
                    buckets.last_mut().expect("one is open").push(Segment {
                        parameter,
                        range: start..stop,
                        owner,
                        start: 0,
                    });
                    start = stop;
                }
            }
        }
        let by_owner = |mut segments: Vec<Segment>| {
            segments.sort_by_key(|segment| segment.owner);
            let (mut offsets, mut end) = (vec![0; self.world_size + 1], 0);
            for segment in &mut segments {
                segment.start = end;
                end += segment.range.len();
                offsets[segment.owner + 1..].fill(end);
            }
            Bucket { segments, offsets }
        };
        buckets.into_iter().map(by_owner).collect()
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

    /// The buckets, in the order of the parameters. During backward gradients may be reduced in
    /// other buckets: see [`ReducePlan`](super::ReducePlan).
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The bucket of a parameter's last element, by index; `None` if it has no elements.
    pub fn last_bucket(&self, parameter: usize) -> Option<usize> {
        let end = self.offsets[parameter + 1];
        (end > self.offsets[parameter]).then(|| (end - 1) / self.bucket_elements)
    }

    /// The most elements that a bucket has.
    pub fn bucket_elements(&self) -> usize {
        self.bucket_elements
    }

    /// The elements that a rank owns of each parameter: ranges in their order, adjacent ones
    /// merged.
    pub fn shard(&self, rank: usize) -> Vec<Vec<Range<usize>>> {
        let of_rank = |owners: &Vec<(usize, Range<usize>)>| {
            let mut shard: Vec<Range<usize>> = Vec::new();
            for (_, range) in owners.iter().filter(|(owner, _)| *owner == rank) {
                match shard.last_mut() {
                    Some(last) if last.end == range.start => last.end = range.end,
                    _ => shard.push(range.clone()),
                }
            }
            shard
        };
        self.owners.iter().map(of_rank).collect()
    }

    /// Length of a rank's shard, padding included.
    pub fn shard_elements(&self, rank: usize) -> usize {
        let buckets = self.buckets.iter();
        buckets.map(|bucket| bucket.part(rank).len()).sum()
    }

    /// Elements of a rank's shard that belong to no parameter.
    pub fn padding(&self, rank: usize) -> usize {
        let owned = self.shard(rank).into_iter().flatten();
        self.shard_elements(rank) - owned.map(|range| range.len()).sum::<usize>()
    }
}

/// The end of a parameter that follows those of these offsets.
fn end_after(offsets: &[usize], parameter: &Parameter) -> Result<usize, InvalidSetting> {
    let end = offsets[offsets.len() - 1].checked_add(parameter.elements);
    end.ok_or_else(|| InvalidSetting {
        setting: "parameters",
        value: parameter.path.clone(),
        expected: "few enough for their elements to be counted",
    })
}

/// By parameter, its ranges with their owners: each bucket is cut into equal parts. `offsets` are
/// those of [`ShardMap`].
fn cuts(
    offsets: &[usize],
    world_size: usize,
    bucket_elements: usize,
) -> Vec<Vec<(usize, Range<usize>)>> {
    let all = offsets[offsets.len() - 1];
    let cut = |parameter: &[usize]| {
        let (first, mut at, mut owners) = (parameter[0], parameter[0], Vec::new());
        while at < parameter[1] {
            let bucket = at / bucket_elements * bucket_elements;
            let elements = bucket_elements.min(all - bucket);
            let part = elements.div_ceil(world_size);
            let owner = (at - bucket) / part;
            let end = bucket + elements.min(part.saturating_mul(owner + 1));
            let end = end.min(parameter[1]);
            owners.push((owner, at - first..end - first));
            at = end;
        }
        owners
    };
    offsets.windows(2).map(cut).collect()
}

/// The owner of each whole parameter: the largest first, each to the rank with the fewest elements
/// (Graham's LPT rule, within 4/3 of the optimum). Ties are broken by position and by rank, so that
/// all ranks compute the same owners.
fn owners(parameters: &[Parameter], world_size: usize) -> Vec<Vec<(usize, Range<usize>)>> {
    let mut largest_first: Vec<usize> = (0..parameters.len()).collect();
    largest_first.sort_by_key(|&index| (Reverse(parameters[index].elements), index));
    let mut least_loaded: BinaryHeap<_> = (0..world_size).map(|rank| Reverse((0, rank))).collect();
    let mut owners = vec![Vec::new(); parameters.len()];
    for index in largest_first {
        if let Some(Reverse((load, rank))) = least_loaded.pop() {
            let elements = parameters[index].elements;
            if elements > 0 {
                owners[index].push((rank, 0..elements));
            }
            least_loaded.push(Reverse((load + elements, rank)));
        }
    }
    owners
}
