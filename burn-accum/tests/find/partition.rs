//! How an effective batch is cut.

use burn_accum::{AccumError, Normalization, Partition};
use proptest::prelude::*;

#[test]
fn impossible_ones_are_refused() {
    for (effective, micro, name) in [(0, 1, "effective_batch"), (1, 0, "micro_batch")] {
        let error = Partition::new(effective, micro).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("{name} = 0, but it must be at least 1")
        );
    }
    assert_eq!(
        Partition::new(4, 5),
        Err(AccumError::LargerThanEffectiveBatch {
            micro_batch: 5,
            effective_batch: 4
        })
    );
}

#[test]
fn a_mean_needs_equal_sizes() {
    let error = Partition::new(10, 4).unwrap().config(Normalization::Mean);
    assert_eq!(
        error,
        Err(AccumError::UnevenMean {
            effective_batch: 10,
            micro_batch: 4,
            last: 2,
            even: 2
        })
    );
    let sum = Partition::new(10, 4).unwrap().config(Normalization::Sum);
    assert_eq!(sum.unwrap().steps, 3);
}

proptest! {
    #[test]
    fn micro_batches_add_up_to_the_effective_batch(effective in 1..5000_usize, micro in 1..5000_usize) {
        let micro = micro.min(effective);
        let partition = Partition::new(effective, micro).unwrap();
        let sizes: Vec<_> = partition.sizes().collect();
        prop_assert_eq!(sizes.len(), partition.steps());
        prop_assert_eq!(sizes.iter().sum::<usize>(), effective);
        prop_assert!(sizes[..sizes.len() - 1].iter().all(|size| *size == micro));
        prop_assert_eq!(*sizes.last().unwrap(), partition.last());
        prop_assert!((1..=micro).contains(&partition.last()));
        let ends: Vec<_> = partition.ranges().map(|range| range.end).collect();
        let starts: Vec<_> = partition.ranges().map(|range| range.start).collect();
        prop_assert_eq!(&starts[1..], &ends[..ends.len() - 1]);
    }

    #[test]
    fn even_ones_are_the_largest_of_equal_size(effective in 1..5000_usize, at_most in 1..5000_usize) {
        let at_most = at_most.min(effective);
        let mean = Partition::new(effective, at_most).unwrap().config(Normalization::Mean);
        let even = match mean {
            Err(AccumError::UnevenMean { even, .. }) => even,
            _ => at_most,
        };
        prop_assert!(Partition::new(effective, even).unwrap().is_even());
        prop_assert!((even + 1..=at_most).all(|size| effective % size != 0));
    }
}
