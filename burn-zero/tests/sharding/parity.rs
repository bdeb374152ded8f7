//! N ranks are one rank with all the data; all stages are one another, bit for bit.

use burn::optim::{AdamWConfig, SgdConfig, momentum::MomentumConfig};
use burn_ranks::BufferDtype;
use burn_zero::{Stage, ZeroSettings};

use super::support::*;

const STEPS: usize = 5;

#[test]
fn ranks_are_one_rank_on_all_data_with_adamw() {
    let plain = train_plain(AdamWConfig::new().init(), STEPS);
    for world_size in 1..=4 {
        for stage in WITH_PARAMETERS {
            let sharded = train_sharded(
                world_size,
                &small_buckets(stage),
                || AdamWConfig::new().init(),
                STEPS,
            );
            let distance = distance(&plain, &sharded);
            assert!(distance < 2e-5, "{world_size} ranks, {stage:?}: {distance}");
        }
    }
}

#[test]
fn ranks_are_one_rank_on_all_data_with_momentum() {
    let sgd = || SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let plain = train_plain(sgd().init(), STEPS);
    for world_size in 1..=4 {
        for stage in WITH_PARAMETERS {
            let sharded = train_sharded(world_size, &small_buckets(stage), || sgd().init(), STEPS);
            let distance = distance(&plain, &sharded);
            assert!(distance < 1e-6, "{world_size} ranks, {stage:?}: {distance}");
        }
    }
}

#[test]
fn one_rank_is_the_wrapped_optimizer_bit_for_bit() {
    let plain = train_plain(AdamWConfig::new().init(), STEPS);
    for stage in WITH_PARAMETERS {
        let sharded = train_sharded(
            1,
            &small_buckets(stage),
            || AdamWConfig::new().init(),
            STEPS,
        );
        assert_eq!(plain, sharded, "{stage:?}");
    }
}

#[test]
fn stages_and_buckets_are_one_another_bit_for_bit() {
    for world_size in 2..=4 {
        let train =
            |sharding| train_sharded(world_size, &sharding, || AdamWConfig::new().init(), STEPS);
        let zero = train(ZeroSettings::stage(Stage::DataParallel));
        for stage in WITH_PARAMETERS {
            for bucket_elements in [1, 40, 1_000_000] {
                let sharding = ZeroSettings {
                    bucket_elements,
                    ..ZeroSettings::stage(stage)
                };
                assert_eq!(
                    zero,
                    train(sharding),
                    "{world_size} ranks, {stage:?}, {bucket_elements}"
                );
            }
        }
    }
}

#[test]
fn gradients_sent_in_half_precision_are_rounded_alike() {
    let plain = train_plain(AdamWConfig::new().init(), STEPS);
    for (dtype, tolerance) in [(BufferDtype::Bf16, 5e-2), (BufferDtype::F16, 1e-2)] {
        let train = |stage| {
            let sharding = ZeroSettings {
                communication_dtype: dtype,
                ..small_buckets(stage)
            };
            train_sharded(3, &sharding, || AdamWConfig::new().init(), STEPS)
        };
        let zero = train(Stage::DataParallel);
        let distance = distance(&plain, &zero);
        assert!(
            distance > 1e-6 && distance < tolerance,
            "{dtype}: {distance}"
        );
        assert_eq!(zero, train(Stage::OptimizerState));
        assert_eq!(zero, train(Stage::Gradients));
    }
}
