//! Any two batch sizes give the third.

use proptest::prelude::*;

use burn_zero::{BatchConfig, BatchSizes};

use crate::fault;

fn config(train: Option<u64>, micro: Option<u64>, steps: Option<u64>) -> BatchConfig {
    BatchConfig {
        train_batch_size: train,
        train_micro_batch_size_per_gpu: micro,
        gradient_accumulation_steps: steps,
    }
}

proptest! {
    #[test]
    fn any_two_sizes_give_the_third(micro in 1u64..1000, steps in 1u64..1000, world_size in 1usize..1000) {
        let train = micro * steps * world_size as u64;
        let expected = BatchSizes { train, micro, steps, world_size };
        for config in [
            config(Some(train), Some(micro), Some(steps)),
            config(Some(train), Some(micro), None),
            config(Some(train), None, Some(steps)),
            config(None, Some(micro), Some(steps)),
        ] {
            prop_assert_eq!(config.resolve(world_size), Ok(expected));
        }
        if world_size > 1 {
            let error = config(Some(train + 1), Some(micro), None).resolve(world_size);
            prop_assert!(error.is_err());
            let error = config(Some(train + 1), None, Some(steps)).resolve(world_size);
            prop_assert!(error.is_err());
        }
    }
}

#[test]
fn one_size_means_one_step() {
    let sizes = |train, micro, steps| BatchSizes {
        train,
        micro,
        steps,
        world_size: 4,
    };
    assert_eq!(
        config(Some(64), None, None).resolve(4),
        Ok(sizes(64, 16, 1))
    );
    assert_eq!(config(None, Some(2), None).resolve(4), Ok(sizes(8, 2, 1)));
    assert_eq!(
        config(None, None, Some(2))
            .resolve(4)
            .unwrap_err()
            .to_string(),
        "neither train_batch_size nor train_micro_batch_size_per_gpu has a number: put one there, or set it in ZeroConfig::batch"
    );
}

#[test]
fn errors_say_the_numbers() {
    let says = |config: BatchConfig, world_size, text: &str| {
        assert_eq!(config.resolve(world_size).unwrap_err().to_string(), text);
    };
    says(
        config(Some(64), Some(4), Some(2)),
        3,
        "train_batch_size 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 3 ranks = 24",
    );
    says(
        config(Some(64), Some(5), None),
        3,
        "train_batch_size 64, but train_micro_batch_size_per_gpu 5 x gradient_accumulation_steps 4 x 3 ranks = 60",
    );
    says(
        config(Some(64), None, None),
        3,
        "train_batch_size 64, but train_micro_batch_size_per_gpu 21 x gradient_accumulation_steps 1 x 3 ranks = 63",
    );
    says(
        config(Some(0), None, None),
        3,
        "train_batch_size: 0, but it must be at least 1",
    );
    says(
        config(Some(1), None, None),
        0,
        "a world of 0 ranks: there must be at least 1",
    );
    let huge = config(None, Some(u64::MAX), Some(u64::MAX))
        .resolve(2)
        .unwrap_err();
    assert_eq!(fault(huge).path(), Some("train_batch_size"));
}
