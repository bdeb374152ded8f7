//! What a shard map promises, for any parameters and any world size.

use burn_ranks::{
    InvalidSetting, RanksError, ShardMap,
    shard::{Parameter, Partition, Progress, ReducePlan},
};
use proptest::prelude::*;

fn parameters(sizes: &[usize]) -> Vec<Parameter> {
    sizes
        .iter()
        .enumerate()
        .map(|(i, &elements)| Parameter::new(format!("layers.{i}"), elements))
        .collect()
}

fn map(
    partition: Partition,
    sizes: &[usize],
    world_size: usize,
    bucket_elements: usize,
) -> ShardMap {
    match partition {
        Partition::Flat => ShardMap::flat(parameters(sizes), world_size, bucket_elements),
        Partition::Whole => ShardMap::whole(parameters(sizes), world_size, bucket_elements),
    }
    .unwrap()
}

/// By rank, the (parameter, element) pairs of its shard.
fn shards(map: &ShardMap) -> Vec<Vec<(usize, usize)>> {
    let shard = |rank| {
        let shard = map.shard(rank).into_iter().enumerate();
        let ranges = shard.flat_map(|(parameter, ranges)| {
            ranges.into_iter().map(move |range| (parameter, range))
        });
        ranges
            .flat_map(|(parameter, range)| range.map(move |element| (parameter, element)))
            .collect()
    };
    (0..map.world_size()).map(shard).collect()
}

fn elements(map: &ShardMap) -> Vec<(usize, usize)> {
    let sizes = map.parameters().iter().map(|parameter| parameter.elements);
    sizes
        .enumerate()
        .flat_map(|(parameter, elements)| (0..elements).map(move |i| (parameter, i)))
        .collect()
}

fn partitions() -> impl Strategy<Value = Partition> {
    prop::sample::select(vec![Partition::Flat, Partition::Whole])
}

/// Shapes with empty parameters, few and many; world sizes above the number of elements; tiny and
/// huge buckets.
fn sizes() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![Just(0_usize), 1..4_usize, 0..60_usize], 0..12)
}

fn bucket_sizes() -> impl Strategy<Value = usize> {
    prop_oneof![1..20_usize, 20..400_usize, Just(usize::MAX)]
}

proptest! {
    #[test]
    fn every_element_is_on_exactly_one_rank(
        partition in partitions(), sizes in sizes(), world_size in 1..17_usize, bucket in bucket_sizes(),
    ) {
        let map = map(partition, &sizes, world_size, bucket);
        let shards = shards(&map);
        let mut owned: Vec<_> = shards.iter().flatten().copied().collect();
        owned.sort_unstable();
        prop_assert_eq!(&owned, &elements(&map));
        prop_assert_eq!(owned.len(), map.elements());
        for (rank, shard) in shards.iter().enumerate() {
            prop_assert_eq!(map.shard_elements(rank) - shard.len(), map.padding(rank));
        }
    }

    #[test]
    fn buckets_hold_every_element_once_in_the_part_of_its_owner(
        partition in partitions(), sizes in sizes(), world_size in 1..9_usize, bucket in bucket_sizes(), seed in any::<u64>(), absent in 0..4_usize,
    ) {
        let map = map(partition, &sizes, world_size, bucket);
        let order = shuffled(sizes.len(), seed, absent);
        let plan = ReducePlan::in_order(&map, &order);
        for buckets in [plan.buckets(), map.buckets()] {
            let mut owned = vec![Vec::new(); world_size];
            for bucket in buckets {
                prop_assert!(0 < bucket.elements() && bucket.elements() <= map.bucket_elements());
                prop_assert_eq!(bucket.counts().iter().sum::<usize>(), bucket.padded_elements());
                let mut end = 0;
                for segment in bucket.segments() {
                    prop_assert_eq!(segment.start, end, "no gaps");
                    end = segment.in_bucket().end;
                    let part = bucket.part(segment.owner);
                    prop_assert!(part.start <= segment.start && end <= part.end);
                    owned[segment.owner].extend(segment.range.clone().map(|element| (segment.parameter, element)));
                }
            }
            owned.iter_mut().for_each(|owned| owned.sort_unstable());
            prop_assert_eq!(owned, shards(&map));
        }
    }

    #[test]
    fn flat_shards_are_equal_and_padding_is_below_the_world_size(
        sizes in sizes(), world_size in 1..17_usize, bucket in bucket_sizes(),
    ) {
        let map = map(Partition::Flat, &sizes, world_size, bucket);
        let first = map.shard_elements(0);
        prop_assert!((0..world_size).all(|rank| map.shard_elements(rank) == first));
        let padding: usize = (0..world_size).map(|rank| map.padding(rank)).sum();
        prop_assert!(padding < world_size);
        prop_assert_eq!(padding, map.buckets().iter().map(|bucket| bucket.padded_elements()).sum::<usize>() - map.elements());
        prop_assert!(map.buckets().iter().all(|b| b.padded_elements() <= bucket.max(world_size)));
        prop_assert!(map.buckets().iter().all(|bucket| bucket.elements() > 0), "no empty bucket");
    }

    #[test]
    fn whole_parameters_are_one_piece_and_balanced(
        sizes in sizes(), world_size in 1..9_usize, bucket in bucket_sizes(),
    ) {
        let map = map(Partition::Whole, &sizes, world_size, bucket);
        let (mut loads, mut smallest) = (vec![0; world_size], vec![0; world_size]);
        for rank in 0..world_size {
            for (size, ranges) in sizes.iter().zip(map.shard(rank)) {
                prop_assert!(ranges.iter().all(|range| *range == (0..*size)));
            }
            let owned: Vec<_> = map.shard(rank).into_iter().flatten().map(|range| range.len()).filter(|&len| len > 0).collect();
            loads[rank] = owned.iter().sum::<usize>();
            smallest[rank] = owned.iter().min().copied().unwrap_or(0);
            prop_assert_eq!(map.padding(rank), 0);
        }
        // Each rank's smallest parameter came last, to what was then the least load.
        let least = loads.iter().min().copied().unwrap_or(0);
        for (load, smallest) in loads.iter().zip(&smallest) {
            prop_assert!(load - smallest <= least, "{loads:?}");
        }
    }

    #[test]
    fn parameters_that_are_added_are_cut_into_equal_parts_and_change_no_owner(
        partition in partitions(), sizes in sizes(), more in sizes(), world_size in 1..9_usize, bucket in bucket_sizes(),
    ) {
        let map = map(partition, &sizes, world_size, bucket);
        let all = map.with_balanced(parameters(&more)).unwrap();
        let mut owned: Vec<_> = shards(&all).into_iter().flatten().collect();
        owned.sort_unstable();
        prop_assert_eq!(owned, elements(&all));
        for rank in 0..world_size {
            let shard = all.shard(rank);
            prop_assert_eq!(&shard[..sizes.len()], &map.shard(rank)[..]);
            for (size, ranges) in more.iter().zip(&shard[sizes.len()..]) {
                let own: usize = ranges.iter().map(|range| range.len()).sum();
                prop_assert!(own == size / world_size || own == size.div_ceil(world_size));
            }
        }
        let in_buckets = all.buckets().iter().flat_map(|bucket| bucket.segments());
        prop_assert_eq!(in_buckets.map(|segment| segment.range.len()).sum::<usize>(), all.elements());
    }

    #[test]
    fn the_last_bucket_has_a_parameters_last_element(
        partition in partitions(), sizes in sizes(), world_size in 1..9_usize, bucket in bucket_sizes(),
    ) {
        let map = map(partition, &sizes, world_size, bucket);
        for (parameter, &elements) in sizes.iter().enumerate() {
            let has_last = |bucket: &burn_ranks::shard::Bucket| {
                bucket.segments().iter().any(|segment| segment.parameter == parameter && segment.range.end == elements)
            };
            prop_assert_eq!(map.last_bucket(parameter), map.buckets().iter().position(has_last));
        }
    }

    #[test]
    fn buckets_are_released_in_their_order_when_they_are_full(
        partition in partitions(), sizes in sizes(), bucket in 1..50_usize, seeds in any::<[u64; 2]>(), absent in 0..4_usize,
    ) {
        let map = map(partition, &sizes, 2, bucket);
        let plan = ReducePlan::in_order(&map, &shuffled(sizes.len(), seeds[0], absent));
        let mut progress = Progress::new(&plan);
        let (mut released, mut arrived) = (Vec::new(), vec![false; sizes.len()]);
        for parameter in shuffled(sizes.len(), seeds[1], absent) {
            arrived[parameter] = true;
            for bucket in progress.arrive(&plan, parameter) {
                prop_assert!(plan.buckets()[bucket].segments().iter().all(|s| arrived[s.parameter]));
                released.push(bucket);
            }
            if let Some(next) = plan.buckets().get(released.len()) {
                prop_assert!(next.segments().iter().any(|s| !arrived[s.parameter]), "not held in vain");
            }
        }
        let absent = progress.missing();
        prop_assert_eq!(absent.len(), arrived.iter().filter(|arrived| !**arrived).count());
        released.extend(absent.into_iter().flat_map(|parameter| progress.arrive(&plan, parameter)));
        prop_assert_eq!(released, (0..plan.buckets().len()).collect::<Vec<_>>());
    }

    /// Gradients that come in the order of the plan wait in one bucket at most, whatever the order
    /// of declaration.
    #[test]
    fn gradients_in_the_order_of_the_plan_fill_one_bucket_at_a_time(
        partition in partitions(), sizes in sizes(), bucket in 2..50_usize, seed in any::<u64>(),
    ) {
        let map = map(partition, &sizes, 2, bucket);
        let order = shuffled(sizes.len(), seed, 0);
        let plan = ReducePlan::in_order(&map, &order);
        let mut progress = Progress::new(&plan);
        let (mut came, mut released) = (0, 0);
        for parameter in order {
            came += sizes[parameter];
            let full = progress.arrive(&plan, parameter);
            released += full.map(|bucket| plan.buckets()[bucket].elements()).sum::<usize>();
            prop_assert!(came - released < map.bucket_elements(), "{} wait", came - released);
        }
        prop_assert_eq!(came, released);
    }
}

/// Some order of all but the last `absent` of so many parameters.
fn shuffled(parameters: usize, seed: u64, absent: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..parameters).collect();
    order.sort_by_key(|&i| (i as u64 + 1).wrapping_mul(seed | 1).rotate_left(23));
    order.truncate(parameters.saturating_sub(absent));
    order
}

#[test]
fn a_bucket_waits_for_those_before_it() {
    let map = map(Partition::Flat, &[10, 10, 10, 10], 2, 10);
    let plan = ReducePlan::in_order(&map, &[3, 2, 1]);
    let mut progress = Progress::new(&plan);
    assert_eq!(progress.arrive(&plan, 3), 0..1);
    assert_eq!(progress.arrive(&plan, 1), 1..1, "2 is not there yet");
    assert_eq!(progress.arrive(&plan, 2), 1..3);
    assert_eq!(progress.arrive(&plan, 2), 3..3, "a second time");
    assert!(!progress.has(0) && progress.has(1));
    assert_eq!(progress.arrive(&plan, 0), 3..4);
}

#[test]
fn sizes_beyond_any_memory_are_only_numbers() {
    let sizes = [usize::MAX / 2, usize::MAX / 4, 7, usize::MAX / 8];
    for partition in [Partition::Flat, Partition::Whole] {
        for world_size in [1, 3, 64] {
            let map = map(partition, &sizes, world_size, usize::MAX / 3);
            let owned: usize = (0..world_size)
                .flat_map(|rank| map.shard(rank).into_iter().flatten())
                .map(|range| range.len())
                .sum();
            assert_eq!(owned, map.elements());
        }
    }
}

#[test]
fn what_cannot_be_counted_or_cut_is_refused() {
    let error = ShardMap::flat(parameters(&[usize::MAX, 1]), 2, 10).unwrap_err();
    assert!(
        error
            .to_string()
            .starts_with("parameters = layers.1, but it must be few enough"),
        "{error}"
    );
    assert!(ShardMap::whole(parameters(&[usize::MAX, 1]), 2, 10).is_err());
    assert!(matches!(
        ShardMap::flat(vec![], 0, 10),
        Err(RanksError::InvalidSetting(InvalidSetting {
            setting: "world_size",
            ..
        }))
    ));
    assert!(matches!(
        ShardMap::whole(vec![], 2, 0),
        Err(RanksError::InvalidSetting(InvalidSetting {
            setting: "bucket_elements",
            ..
        }))
    ));
}
