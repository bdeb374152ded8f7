//! The parameters, the elements of them that this rank holds, and their buckets.

use core::ops::Range;

use burn_backend::DType;

use super::step_tag::StepTag;
use crate::shard::{self, Bucket, Partition, Segment, ShardMap};
use crate::{Stage, ZeroError, ZeroSettings};

/// A parameter, described equally on all ranks.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Parameter {
    /// Its path in the module, such as `blocks.0.mlp.weight`.
    pub(crate) path: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: DType,
}

impl Parameter {
    pub(crate) fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Size of the parameter, and of its gradient.
    pub(crate) fn bytes(&self) -> usize {
        self.elements() * self.dtype.size()
    }

    /// The shape of a shard of `elements`: as many dimensions as the parameter has, so that a tensor of its type can hold it.
    pub(crate) fn piece_shape(&self, elements: usize) -> Vec<usize> {
        let mut shape = vec![1; self.shape.len()];
        if let Some(last) = shape.last_mut() {
            *last = elements;
        }
        shape
    }
}

/// All parameters in the order of the module, and the shard of one rank.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    parameters: Vec<Parameter>,
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
    /// [`ZeroError::InvalidSetting`] for buckets of nothing.
    pub(crate) fn new(
        parameters: Vec<Parameter>,
        world_size: usize,
        rank: usize,
        settings: &ZeroSettings,
    ) -> Result<Self, ZeroError> {
        let list = parameters
            .iter()
            .map(|parameter| shard::Parameter::new(&*parameter.path, parameter.elements()));
        let map = match settings.partition {
            Partition::Flat => ShardMap::flat,
            Partition::Whole => ShardMap::whole,
        };
        let map = map(list.collect(), world_size, settings.bucket_elements)?;
        let shard = shard_of(&map, rank);
        Ok(Self {
            parameters,
            map,
            rank,
            shard,
            holds_all: settings.stage == Stage::DataParallel || world_size == 1,
        })
    }

    /// The elements of each parameter in the shard of another rank, ascending.
    pub(crate) fn shards_of(&self, rank: usize) -> Vec<Vec<Range<usize>>> {
        shard_of(&self.map, rank)
    }

    /// The map from elements to ranks.
    pub(crate) fn map(&self) -> &ShardMap {
        &self.map
    }

    /// The rank of this shard.
    pub(crate) fn rank(&self) -> usize {
        self.rank
    }

    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    /// In the order of the parameters.
    pub(crate) fn buckets(&self) -> &[Bucket] {
        self.map.buckets()
    }

    /// The buckets of a parameter's elements, in their order.
    pub(crate) fn buckets_of(&self, parameter: usize) -> impl Iterator<Item = usize> {
        self.map.segments(parameter).map(|(bucket, _)| bucket)
    }

    /// Whether this rank holds all elements of all parameters.
    pub(crate) fn holds_all(&self) -> bool {
        self.holds_all
    }

    /// The elements of a parameter in this rank's shard, ascending.
    pub(crate) fn shard(&self, parameter: usize) -> &[Range<usize>] {
        &self.shard[parameter]
    }

    /// How many elements of a parameter this rank holds.
    pub(crate) fn held(&self, parameter: usize) -> usize {
        if self.holds_all {
            self.parameters[parameter].elements()
        } else {
            self.shard[parameter].iter().map(Range::len).sum()
        }
    }

    /// The shape of this rank's shard of a parameter for the wrapped optimizer.
    pub(crate) fn piece_shape(&self, parameter: usize) -> Vec<usize> {
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

    /// The segments in a part of a bucket, without padding.
    pub(crate) fn slots(&self, bucket: usize, part: Range<usize>) -> impl Iterator<Item = Segment> {
        self.map.buckets()[bucket].segments_in(part)
    }

    /// This rank's part of a bucket.
    pub(crate) fn own_part(&self, bucket: usize) -> Range<usize> {
        self.map.buckets()[bucket].part(self.rank)
    }

    /// The name of a bucket in labels.
    pub(crate) fn bucket_name(&self, bucket: usize, at: StepTag) -> String {
        self.name_of(bucket, &self.map.buckets()[bucket], at)
    }

    /// The name of a bucket of any plan. The step tag comes before the paths, because long labels are cut at the end.
    pub(super) fn name_of(&self, number: usize, bucket: &Bucket, at: StepTag) -> String {
        let segments = bucket.segments().iter();
        let mut all: Vec<_> = segments.map(|segment| segment.parameter).collect();
        all.sort_unstable();
        all.dedup();
        let path = |parameter: usize| &self.parameters[parameter].path;
        match all[..] {
            [] => format!("bucket {number}, {at}"),
            [only] => format!("bucket {number}, {at} ({})", path(only)),
            [first, .., last] => {
                let (first, last, count) = (path(first), path(last), all.len());
                format!("bucket {number}, {at} ({first} to {last}, {count} parameters)")
            }
        }
    }
}

/// The elements of each parameter in a rank's shard, ascending.
fn shard_of(map: &ShardMap, rank: usize) -> Vec<Vec<Range<usize>>> {
    let mut shard = vec![Vec::new(); map.parameters().len()];
    for piece in map.pieces(rank) {
        join(&mut shard[piece.parameter], piece.range);
    }
    shard
}

/// Adds a range, merged with the last one if they are adjacent.
fn join(ranges: &mut Vec<Range<usize>>, next: Range<usize>) {
    match ranges.last_mut() {
        Some(last) if last.end == next.start => last.end = next.end,
        _ => ranges.push(next),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn pieces_of_all_ranks_are_the_parameters(
            shapes in prop::collection::vec(prop::collection::vec(0_usize..9, 1..4), 0..12),
            world_size in 1_usize..9,
            bucket_elements in 1_usize..200,
            partition in prop_oneof![Just(Partition::Flat), Just(Partition::Whole)],
        ) {
            let parameters: Vec<_> = shapes.iter().enumerate().map(|(index, shape)| Parameter {
                path: format!("p{index}"),
                shape: shape.clone(),
                dtype: DType::F32,
            }).collect();
            let mut found: Vec<_> = parameters.iter().map(|p| vec![0; p.elements()]).collect();
            for rank in 0..world_size {
                let settings = ZeroSettings { bucket_elements, partition, ..ZeroSettings::default() };
                let layout = Layout::new(parameters.clone(), world_size, rank, &settings).unwrap();
                let mut pieces: Vec<_> = (0..parameters.len()).map(|p| vec![false; layout.held(p)]).collect();
                for bucket in 0..layout.buckets().len() {
                    for slot in layout.slots(bucket, layout.own_part(bucket)) {
                        for element in slot.range {
                            found[slot.parameter][element] += 1;
                            pieces[slot.parameter][layout.position(slot.parameter, element)] = true;
                        }
                    }
                }
                prop_assert!(pieces.iter().flatten().all(|&filled| filled));
            }
            prop_assert!(found.iter().flatten().all(|&ranks| ranks == 1));
        }
    }
}
