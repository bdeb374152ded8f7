//! Parameters without a gradient.

use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, MultiGradientsParams, Optimizer};
use burn::prelude::*;
use burn_update::UpdateError;
use burn_zero::{GroupFault, GroupOptions, ProcessGroup, RanksError, Stage, ThreadGroup};

use super::support::*;

const STEPS: usize = 4;

/// Every second step, rank 0 alone uses the parameter `sometimes`.
fn train(world_size: usize, stage: Stage) -> Vec<Vec<f32>> {
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let mut optimizer = over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?;
        let mut model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..STEPS {
            let x = batch(step, rank, world_size);
            let mut loss = model.loss(x);
            if step % 2 == 1 && rank == 0 {
                loss = loss + model.sometimes.val().square().mean();
            }
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients)?;
        }
        Ok(parameters(&model))
    })
}

#[test]
fn it_takes_part_with_zeros_where_another_rank_has_one() {
    for world_size in 1..=4 {
        let mut optimizer = AdamWConfig::new().init();
        let mut model = Net::<Plain>::new(&Default::default());
        let initial = parameters(&model);
        for step in 0..STEPS {
            let mut loss = model.loss(batch(step, 0, 1));
            if step % 2 == 1 {
                loss = loss + model.sometimes.val().square().mean() / world_size as f32;
            }
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        let plain = parameters(&model);
        for stage in STAGES {
            let sharded = train(world_size, stage);
            let distance = distance(&plain, &sharded);
            assert!(distance < 2e-5, "{world_size} ranks, {stage:?}: {distance}");
            // No gradient on any rank: not even its weight decays, as without sharding.
            assert_eq!(sharded.last(), initial.last());
        }
    }
}

#[test]
fn a_forward_pass_without_backward_changes_nothing() {
    for stage in STAGES {
        let train = |idle: bool| {
            on_ranks(3, |group| {
                let rank = group.rank();
                let mut optimizer =
                    over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?;
                let mut model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
                for step in 0..STEPS {
                    // The graphs of the others stay alive for a while.
                    let kept = (idle && rank == 0).then(|| model.loss(batch(90 + step, rank, 3)));
                    let loss = model.loss(batch(step, rank, 3));
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients)?;
                    drop(kept);
                }
                Ok(parameters(&model))
            })
        };
        assert_eq!(train(false), train(true), "{stage:?}");
    }
}

/// Autodiff frees its graph in the next backward pass, which may be of another optimizer.
#[test]
fn nor_does_it_keep_a_dropped_optimizer() {
    on_ranks(2, |group| {
        let (adam, sharding) = (AdamWConfig::new().init(), small_buckets(Stage::Gradients));
        let mut optimizer = over_ranks(adam, group.clone(), sharding)?;
        let model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
        drop(model.loss(batch(0, group.rank(), 2)));
        drop((optimizer, model));
        assert_eq!(Arc::strong_count(&group), 1);
        Ok(())
    });
}

/// At stage 3 that graph keeps the group: a rank leaves it when its function returns.
#[test]
fn a_rank_that_returns_after_a_forward_pass_has_left() {
    let deadline = GroupOptions::with_deadline(Duration::from_secs(60));
    for stage in WITH_PARAMETERS {
        let results = ThreadGroup::spawn(2, deadline.clone(), |group| {
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            let adam = AdamWConfig::new().init();
            let mut optimizer = over_ranks(adam, group.clone(), small_buckets(stage))?;
            let model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
            let loss = model.loss(batch(0, group.rank(), 2));
            if group.rank() == 1 {
                return Ok(loss); // whose graph gathers parameters
            }
            group.barrier("after the forward pass")?;
            Ok::<_, UpdateError>(loss)
        });
        let [zero, one] = <[_; 2]>::try_from(results.unwrap()).unwrap();
        let left = zero.map(drop).unwrap_err();
        assert!(
            matches!(
                left,
                UpdateError::Ranks(RanksError::Group(GroupFault::PeerLeft { peer: 1, .. }))
            ),
            "{stage:?}: {left}"
        );
        drop(one);
    }
}

#[test]
fn gradients_of_two_backward_passes_may_be_read_apart() {
    for stage in STAGES {
        let train = |together: bool| {
            on_ranks(2, |group| {
                let rank = group.rank();
                let mut optimizer =
                    over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?;
                let mut model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
                for step in 0..STEPS {
                    let first = model.loss(batch(step, rank, 2));
                    let gradients = if together {
                        let second = model.loss(batch(50 + step, rank, 2));
                        drop(GradientsParams::from_grads(second.backward(), &model));
                        GradientsParams::from_grads(first.backward(), &model)
                    } else {
                        GradientsParams::from_grads(first.backward(), &model)
                    };
                    model = optimizer.step(0.05, model, gradients)?;
                }
                Ok(parameters(&model))
            })
        };
        assert_eq!(train(true), train(false), "{stage:?}");
    }
}

#[test]
fn leaves_that_nobody_prepared_are_reduced_in_the_step() {
    for stage in STAGES {
        let train = |reload: bool| {
            on_ranks(3, |group| {
                let rank = group.rank();
                let adam = AdamWConfig::new().init();
                let mut optimizer = over_ranks(adam, group, small_buckets(stage))?;
                let mut model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
                for step in 0..STEPS {
                    if reload && step == 2 {
                        // Other leaves, the same ids.
                        model = model.fork(&Default::default());
                    }
                    let loss = model.loss(batch(step, rank, 3));
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients)?;
                }
                Ok(parameters(&model))
            })
        };
        let distance = distance(&train(false), &train(true));
        assert!(distance < 1e-6, "{stage:?}: {distance}");
    }
}

#[test]
fn several_devices_of_a_rank_are_added_up() {
    for stage in STAGES {
        let train = |multi: bool| {
            on_ranks(2, |group| {
                let rank = group.rank();
                let adam = AdamWConfig::new().init();
                let mut optimizer = over_ranks(adam, group, small_buckets(stage))?;
                let mut model = optimizer.prepare(Net::<B>::new(&Default::default()))?;
                for step in 0..STEPS {
                    let gradients = |part: usize| {
                        let loss = model.loss(batch(step, 2 * rank + part, 4));
                        GradientsParams::from_grads(loss.backward(), &model)
                    };
                    if multi {
                        let device = burn_flex::FlexDevice.to_id();
                        let both = MultiGradientsParams {
                            grads: vec![(gradients(0), device), (gradients(1), device)],
                        };
                        model = optimizer.step(0.05, model, both)?;
                    } else {
                        let loss = model.loss(batch(step, 2 * rank, 4))
                            + model.loss(batch(step, 2 * rank + 1, 4));
                        let gradients = GradientsParams::from_grads(loss.backward(), &model);
                        model = optimizer.step(0.05, model, gradients)?;
                    }
                }
                Ok(parameters(&model))
            })
        };
        let distance = distance(&train(false), &train(true));
        assert!(distance < 2e-5, "{stage:?}: {distance}");
    }
}

/// A model whose loss has a factor, which is clamped after each step: a new leaf among those that
/// the optimizer returned.
#[derive(Module, Debug)]
struct Scaled<B: Backend> {
    net: Net<B>,
    factor: Param<Tensor<B, 1>>,
}

#[test]
fn so_is_a_single_leaf_that_was_replaced_since_the_last_step() {
    for elements in [1, 5] {
        let train = |stage| {
            on_ranks(2, |group| {
                let rank = group.rank();
                let adam = AdamWConfig::new().init();
                let mut optimizer = over_ranks(adam, group, small_buckets(stage))?;
                let device = Default::default();
                let model = Scaled {
                    net: Net::<B>::new(&device),
                    factor: Param::from_tensor(Tensor::ones([elements], &device)),
                };
                let mut model = optimizer.prepare(model)?;
                for step in 0..STEPS {
                    let loss = model.net.loss(batch(step, rank, 2)) * model.factor.val().mean();
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients)?;
                    let clamped = |factor: Tensor<_, 1>| factor.clamp(0.0, 4.6).detach();
                    model.factor = model.factor.map(|factor| clamped(factor).require_grad());
                }
                Ok(parameters(&model))
            })
        };
        let expected = train(Stage::DataParallel);
        for stage in WITH_PARAMETERS {
            assert!(train(stage) == expected, "{elements} {stage:?}");
        }
    }
}
