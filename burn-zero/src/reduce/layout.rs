//! Which rank holds what: integers only.

use core::ops::Range;

use burn_backend::DType;

use crate::Partition;

/// A parameter as all ranks know it.
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

    /// The shape of `elements` of it: of its rank, so that a tensor of the parameter's type can hold them.
    pub(crate) fn piece_shape(&self, elements: usize) -> Vec<usize> {
        let mut shape = vec![1; self.shape.len()];
        if let Some(last) = shape.last_mut() {
            *last = elements;
        }
        shape
    }
}

/// The part of a parameter that one rank holds.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Segment {
    pub(crate) parameter: usize,
    pub(crate) rank: usize,
    /// In the parameter.
    pub(crate) range: Range<usize>,
    /// Where it starts in the bucket's buffer.
    pub(crate) offset: usize,
}

/// Parameters whose gradients travel together, as one flat buffer: first rank 0's part, then rank 1's, and so on.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Bucket {
    pub(crate) parameters: Vec<usize>,
    pub(crate) segments: Vec<Segment>,
    /// Elements of each rank's part.
    pub(crate) parts: Vec<usize>,
}

impl Bucket {
    pub(crate) fn elements(&self) -> usize {
        self.parts.iter().sum()
    }

    /// Where a rank's part starts.
    pub(crate) fn start(&self, rank: usize) -> usize {
        self.parts[..rank].iter().sum()
    }
}

/// All parameters, in the order of the module, and their buckets, in the order in which backward is expected to complete
/// their gradients: the last parameters first.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Layout {
    parameters: Vec<Parameter>,
    buckets: Vec<Bucket>,
    /// Of each parameter.
    bucket_of: Vec<usize>,
}

impl Layout {
    pub(crate) fn new(
        parameters: Vec<Parameter>,
        world_size: usize,
        bucket_elements: usize,
        partition: Partition,
    ) -> Self {
        let groups = group(&parameters, bucket_elements);
        let mut bucket_of = vec![0; parameters.len()];
        for (bucket, group) in groups.iter().enumerate() {
            group.iter().for_each(|&index| bucket_of[index] = bucket);
        }
        let buckets = match partition {
            Partition::Elements => groups
                .into_iter()
                .map(|group| by_elements(&parameters, group, world_size))
                .collect(),
            Partition::Parameters => {
                let owners = owners(&parameters, world_size);
                groups
                    .into_iter()
                    .map(|group| by_owner(&parameters, group, &owners, world_size))
                    .collect()
            }
        };
        Self {
            parameters,
            buckets,
            bucket_of,
        }
    }

    pub(crate) fn parameters(&self) -> &[Parameter] {
        &self.parameters
    }

    pub(crate) fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    pub(crate) fn bucket_of(&self, parameter: usize) -> usize {
        self.bucket_of[parameter]
    }

    /// The elements of a parameter that a rank holds; empty if none.
    pub(crate) fn range(&self, parameter: usize, rank: usize) -> Range<usize> {
        let bucket = &self.buckets[self.bucket_of[parameter]];
        let mut segments = bucket.segments.iter();
        segments
            .find(|segment| segment.parameter == parameter && segment.rank == rank)
            .map_or(0..0, |segment| segment.range.clone())
    }

    /// What a message about bucket `index` calls it.
    pub(crate) fn bucket_name(&self, index: usize) -> String {
        let parameters = &self.buckets[index].parameters;
        let path = |index: usize| &self.parameters[index].path;
        match parameters.as_slice() {
            [] => format!("bucket {index}"),
            [only] => format!("bucket {index} ({})", path(*only)),
            [first, .., last] => format!(
                "bucket {index} ({} to {}, {} parameters)",
                path(*last),
                path(*first),
                parameters.len()
            ),
        }
    }
}

/// Parameters from the last to the first, in groups of at least `bucket_elements`.
fn group(parameters: &[Parameter], bucket_elements: usize) -> Vec<Vec<usize>> {
    let mut groups = Vec::new();
    let (mut current, mut elements) = (Vec::new(), 0);
    for (index, parameter) in parameters.iter().enumerate().rev() {
        elements += parameter.elements();
        current.push(index);
        if elements >= bucket_elements {
            groups.push(core::mem::take(&mut current));
            elements = 0;
        }
    }
    if !current.is_empty() {
        groups.push(current);
    }
    groups
}

/// The parameters end to end, cut in equal parts.
fn by_elements(parameters: &[Parameter], group: Vec<usize>, world_size: usize) -> Bucket {
    let total: usize = group.iter().map(|&index| parameters[index].elements()).sum();
    let cut = |rank: usize| (total as u128 * rank as u128 / world_size as u128) as usize;
    let mut segments = Vec::new();
    let mut start = 0;
    for &parameter in &group {
        let end = start + parameters[parameter].elements();
        for rank in 0..world_size {
            let (from, to) = (cut(rank).max(start), cut(rank + 1).min(end));
            if from < to {
                segments.push(Segment {
                    parameter,
                    rank,
                    range: from - start..to - start,
                    offset: from,
                });
            }
        }
        start = end;
    }
    Bucket {
        parameters: group,
        segments,
        parts: (0..world_size).map(|rank| cut(rank + 1) - cut(rank)).collect(),
    }
}

/// The parameters of each owner, whole.
fn by_owner(
    parameters: &[Parameter],
    group: Vec<usize>,
    owners: &[usize],
    world_size: usize,
) -> Bucket {
    let (mut segments, mut parts) = (Vec::new(), Vec::new());
    let mut offset = 0;
    for rank in 0..world_size {
        let start = offset;
        for &parameter in group.iter().filter(|&&index| owners[index] == rank) {
            let range = 0..parameters[parameter].elements();
            if range.is_empty() {
                continue;
            }
            let end = offset + range.end;
            segments.push(Segment {
                parameter,
                rank,
                range,
                offset,
            });
            offset = end;
        }
        parts.push(offset - start);
    }
    Bucket {
        parameters: group,
        segments,
        parts,
    }
}

/// The rank of each parameter: the largest first, each to the rank that holds least (Graham's rule, at most 4/3 of the best).
fn owners(parameters: &[Parameter], world_size: usize) -> Vec<usize> {
    let mut order: Vec<_> = (0..parameters.len()).collect();
    order.sort_by_key(|&index| (core::cmp::Reverse(parameters[index].elements()), index));
    let mut held = vec![0; world_size];
    let mut owners = vec![0; parameters.len()];
    for index in order {
        let rank = (0..world_size).min_by_key(|&rank| held[rank]).unwrap_or(0);
        held[rank] += parameters[index].elements();
        owners[index] = rank;
    }
    owners
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn layout(
        sizes: &[Vec<usize>],
        world_size: usize,
        bucket: usize,
        partition: Partition,
    ) -> Layout {
        let parameters = sizes.iter().enumerate().map(|(index, shape)| Parameter {
            path: format!("p{index}"),
            shape: shape.clone(),
            dtype: DType::F32,
        });
        Layout::new(parameters.collect(), world_size, bucket, partition)
    }

    fn partition() -> impl Strategy<Value = Partition> {
        prop_oneof![Just(Partition::Elements), Just(Partition::Parameters)]
    }

    proptest! {
        #[test]
        fn every_element_is_on_exactly_one_rank(
            sizes in prop::collection::vec(prop::collection::vec(0_usize..9, 1..4), 0..12),
            world_size in 1_usize..9,
            bucket in 0_usize..200,
            partition in partition(),
        ) {
            let layout = layout(&sizes, world_size, bucket, partition);
            for (index, parameter) in layout.parameters().iter().enumerate() {
                let mut held = vec![0; parameter.elements()];
                for rank in 0..world_size {
                    for element in layout.range(index, rank) {
                        held[element] += 1;
                    }
                }
                prop_assert!(held.iter().all(|&ranks| ranks == 1));
            }
        }

        #[test]
        fn a_bucket_is_filled_without_gaps(
            sizes in prop::collection::vec(prop::collection::vec(0_usize..9, 1..4), 1..12),
            world_size in 1_usize..9,
            bucket in 0_usize..200,
            partition in partition(),
        ) {
            let layout = layout(&sizes, world_size, bucket, partition);
            let mut met = Vec::new();
            for bucket in layout.buckets() {
                met.extend(bucket.parameters.iter().copied());
                let mut filled = vec![0; bucket.elements()];
                for segment in &bucket.segments {
                    let part = bucket.start(segment.rank)..bucket.start(segment.rank) + bucket.parts[segment.rank];
                    let at = segment.offset..segment.offset + segment.range.len();
                    prop_assert!(part.start <= at.start && at.end <= part.end);
                    filled[at].iter_mut().for_each(|filled| *filled += 1);
                }
                prop_assert!(filled.iter().all(|&segments| segments == 1));
            }
            let last_first: Vec<_> = (0..sizes.len()).rev().collect();
            prop_assert_eq!(met, last_first);
        }

        #[test]
        fn elements_are_balanced(
            sizes in prop::collection::vec(prop::collection::vec(0_usize..9, 1..4), 1..12),
            world_size in 1_usize..9,
            bucket in 0_usize..200,
        ) {
            for bucket in layout(&sizes, world_size, bucket, Partition::Elements).buckets() {
                let (least, most) = (bucket.parts.iter().min(), bucket.parts.iter().max());
                prop_assert!(most.unwrap() - least.unwrap() <= 1);
            }
        }
    }
}
