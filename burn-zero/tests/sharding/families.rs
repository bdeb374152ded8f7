//! Each family of optimizers is on any number of ranks what it is on one.

use burn::optim::{AdaGradConfig, AdamConfig, AdanConfig, Optimizer, RmsPropConfig};
use burn_zero::{ParameterShards, Partition, ZeroSettings};

use super::optimizers::trusting;
use super::support::*;

const STEPS: usize = 5;
/// f32 rounding of sums in another order, which optimizers that divide by the gradient's own size
/// enlarge; most in RMSprop, whose first steps are ten times the learning rate.
const ROUNDING: f32 = 5e-5;

fn assert_parity<O, S>(
    name: &str,
    partition: Partition,
    plain: impl Fn() -> O,
    sharded: impl Fn() -> S + Sync,
) where
    O: Optimizer<Net<Plain>, Plain>,
    S: Optimizer<ParameterShards<B>, B> + 'static,
{
    let initial = parameters(&Net::<Plain>::new(&Default::default()));
    let plain = train_plain(plain(), STEPS);
    assert!(distance(&initial, &plain) > 0.01, "{name} has not trained");
    for world_size in 1..=4 {
        let train = |stage| {
            let sharding = ZeroSettings {
                partition,
                ..small_buckets(stage)
            };
            train_sharded(world_size, &sharding, &sharded, STEPS)
        };
        let stages = WITH_PARAMETERS.map(train);
        let distance = distance(&plain, &stages[0]);
        assert!(
            distance < ROUNDING,
            "{name}, {world_size} ranks: {distance}"
        );
        assert_eq!(stages[0], stages[1], "{name}, {world_size} ranks");
        assert_eq!(stages[0], stages[2], "{name}, {world_size} ranks");
        assert_eq!(stages[0], stages[3], "{name}, {world_size} ranks");
    }
}

#[test]
fn adam() {
    let config = AdamConfig::new;
    assert_parity(
        "Adam",
        Partition::Flat,
        || config().init(),
        || config().init(),
    );
}

#[test]
fn rmsprop() {
    for centered in [false, true] {
        let config = || RmsPropConfig::new().with_centered(centered);
        assert_parity(
            "RMSprop",
            Partition::Flat,
            || config().init(),
            || config().init(),
        );
    }
}

#[test]
fn adagrad() {
    let config = || AdaGradConfig::new().with_lr_decay(0.01);
    assert_parity(
        "Adagrad",
        Partition::Flat,
        || config().init(),
        || config().init(),
    );
}

#[test]
fn adan() {
    let config = AdanConfig::new;
    assert_parity(
        "Adan",
        Partition::Flat,
        || config().init(),
        || config().init(),
    );
}

#[test]
fn one_that_takes_each_tensors_norm() {
    assert_parity("LAMB-like", Partition::Whole, trusting, trusting);
}
