//! What cannot be sharded exactly is refused with the reason; what can by whole parameters, is.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::backend::Autodiff;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_accum::ClipGlobalNorm;
use burn_flex::Flex;
use burn_zero::{
    Memory, ParameterShards, Partition, Stage, ZeroError, ZeroOptimizer, ZeroOptimizerError,
    ZeroSettings,
};

use super::optimizers::{Adaptive, LooksAt, trusting};
use super::support::*;

fn refused<O: Optimizer<ParameterShards<B>, B>>(
    optimizer: impl Fn() -> O + Sync,
    stage: Stage,
) -> ZeroError {
    on_ranks(2, |group| {
        let mut zero = ZeroOptimizer::new(optimizer(), group, ZeroSettings::stage(stage))?;
        Ok(zero.prepare::<B, _>(Net::new(&Default::default())).err())
    })
    .expect("it is refused")
}

#[test]
fn clipping_tensor_by_tensor_is_found() {
    let clipping = Some(GradientClippingConfig::Norm(1.0));
    let config = SgdConfig::new().with_gradient_clipping(clipping);
    let error = refused(|| config.init(), Stage::OptimizerState);
    assert!(
        matches!(
            error,
            ZeroError::Optimizer(ZeroOptimizerError::NotShardable { .. })
        ),
        "{error}"
    );
    assert!(
        error.to_string().contains("partition: Partition::Whole"),
        "{error}"
    );

    // Value by value is another matter.
    let clipping = Some(GradientClippingConfig::Value(1.0));
    let config = SgdConfig::new().with_gradient_clipping(clipping);
    train_sharded(
        2,
        &ZeroSettings::stage(Stage::OptimizerState),
        || config.init(),
        1,
    );
}

#[test]
fn muon_is_refused_in_pieces_and_exact_whole() {
    let error = refused(|| MuonConfig::new().init(), Stage::OptimizerState);
    assert!(error.to_string().contains("Muon"), "{error}");

    #[derive(Module, Debug)]
    struct Matrices<B: Backend> {
        layers: Vec<nn::Linear<B>>,
    }
    impl<B: Backend> Matrices<B> {
        fn new() -> Self {
            let device = Default::default();
            let layers = (0..5).map(|seed| {
                let mut layer = nn::LinearConfig::new(7, 7).with_bias(false).init(&device);
                let weight = values(49, seed);
                let weight = Tensor::<B, 1>::from_data(weight.as_slice(), &device);
                layer.weight = burn::module::Param::from_tensor(weight.reshape([7, 7]));
                layer
            });
            Self {
                layers: layers.collect(),
            }
        }
        fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
            self.layers
                .iter()
                .fold(x, |x, layer| layer.forward(x).tanh())
                .square()
                .mean()
        }
    }

    let mut optimizer = MuonConfig::new().init();
    let mut model = Matrices::<Plain>::new();
    for step in 0..3 {
        let gradients =
            GradientsParams::from_grads(model.loss(batch(step, 0, 1)).backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    let plain = parameters(&model);
    for world_size in 1..=4 {
        for stage in STAGES {
            let sharding = ZeroSettings {
                partition: Partition::Whole,
                ..small_buckets(stage)
            };
            let sharded = on_ranks(world_size, |group| {
                let rank = group.rank();
                let mut optimizer =
                    ZeroOptimizer::new(MuonConfig::new().init(), group, sharding.clone())?;
                let mut model = optimizer.prepare::<B, _>(Matrices::new())?;
                for step in 0..3 {
                    let loss = model.loss(batch(step, rank, world_size));
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients);
                }
                Ok(parameters(&model))
            });
            let distance = distance(&plain, &sharded);
            assert!(distance < 2e-5, "{world_size} ranks, {stage:?}: {distance}");
        }
    }
}

/// That an optimizer looks at tensors of other ranks is seen in what it does, not in its name,
/// whatever is cut.
#[test]
fn what_looks_at_all_tensors_is_refused() {
    for partition in [Partition::Flat, Partition::Whole] {
        let sharding = ZeroSettings {
            partition,
            ..small_buckets(Stage::Gradients)
        };
        let clip = || ClipGlobalNorm::new(AdamWConfig::new().init(), 1.0).unwrap();
        assert_coupled(&sharding, clip);
        for looks_at in [LooksAt::GradientNorm, LooksAt::LargestSoFar] {
            let sgd = || Adaptive::new(SgdConfig::new().init(), looks_at);
            assert_coupled(&sharding, sgd);
            // One rank has all tensors.
            train_sharded(1, &sharding, sgd, 1);
        }
    }
    let sharding = ZeroSettings {
        partition: Partition::Whole,
        ..ZeroSettings::default()
    };
    assert_coupled(&sharding, || {
        Adaptive::new(SgdConfig::new().init(), LooksAt::Tensors)
    });
}

fn assert_coupled<O: Optimizer<ParameterShards<B>, B>>(
    sharding: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
) {
    let error = on_ranks(2, |group| {
        let mut zero = ZeroOptimizer::new(optimizer(), group, sharding.clone())?;
        Ok(zero.prepare::<B, _>(Net::new(&Default::default())).err())
    });
    assert!(
        matches!(
            error,
            Some(ZeroError::Optimizer(ZeroOptimizerError::NotShardable { instead, .. }))
                if instead.contains("depends on all it meets")
        ),
        "{sharding:?}: {error:?}"
    );
}

/// Around it each rank would clip by the norm of its own shards.
#[test]
fn clipping_around_it_is_refused() {
    let message = on_ranks(2, |group| {
        let settings = ZeroSettings::stage(Stage::Gradients);
        let zero = ZeroOptimizer::new(AdamWConfig::new().init(), group, settings)?;
        let mut clip = ClipGlobalNorm::new(zero, 1.0).unwrap();
        let net = Net::<B>::new(&Default::default());
        let step = AssertUnwindSafe(|| clip.step(0.1, net, GradientsParams::new()));
        let panic = catch_unwind(step).map(drop).expect_err("a refusal");
        Ok(panic.downcast_ref::<String>().cloned())
    });
    let message = message.expect("a message");
    assert!(
        message.contains("ClipGlobalNorm around ZeroOptimizer"),
        "{message}"
    );
}

/// A norm that is handed to nobody does not make it exact.
#[test]
fn a_norm_must_reach_what_clips() {
    let prepare = |reaches: bool| {
        on_ranks(2, |group| {
            let clip = ClipGlobalNorm::new(AdamWConfig::new().init(), 1.0).unwrap();
            let norm = clip.norm();
            let mut zero =
                ZeroOptimizer::new(clip, group, ZeroSettings::default())?.with_norm(move |value| {
                    if reaches {
                        norm.provide(value);
                    }
                });
            Ok(zero.prepare::<B, _>(Net::new(&Default::default())).err())
        })
    };
    assert_eq!(prepare(true), None);
    let error = prepare(false);
    assert!(
        matches!(
            error,
            Some(ZeroError::Optimizer(ZeroOptimizerError::NotShardable { instead, .. }))
                if instead.contains("depends on all it meets")
        ),
        "{error:?}"
    );
}

#[test]
fn a_norm_per_tensor_is_refused_in_pieces() {
    let error = refused(trusting, Stage::OptimizerState);
    assert!(
        matches!(
            error,
            ZeroError::Optimizer(ZeroOptimizerError::NotShardable { .. })
        ),
        "{error}"
    );
}

#[test]
fn state_that_clones_share_is_refused() {
    let sgd = || Adaptive::new(SgdConfig::new().init(), LooksAt::StepsOfClones);
    let error = refused(sgd, Stage::OptimizerState);
    assert!(
        matches!(
            error,
            ZeroError::Optimizer(ZeroOptimizerError::NotShardable { .. })
        ),
        "{error}"
    );
}

#[test]
fn gradients_that_leave_during_backward_need_a_backend_that_can() {
    let kept = ZeroSettings {
        gradients: Memory::Host,
        ..ZeroSettings::stage(Stage::OptimizerState)
    };
    for (ranks, sharding) in [
        (2, ZeroSettings::stage(Stage::Gradients)),
        (2, kept.clone()),
        (1, kept),
    ] {
        let error = on_ranks(ranks, |group| {
            let adam = AdamWConfig::new().init();
            let mut zero = ZeroOptimizer::new(adam, group, sharding.clone())?;
            Ok(zero
                .prepare::<Autodiff<Flex>, _>(Net::new(&Default::default()))
                .err())
        });
        let error = error.unwrap();
        assert!(
            matches!(
                error,
                ZeroError::Optimizer(ZeroOptimizerError::NotSharded { .. })
            ),
            "{error}"
        );
    }
}

#[test]
fn stage_one_does_not() {
    let train = |group: std::sync::Arc<dyn burn_zero::ProcessGroup>| {
        let rank = group.rank();
        let adam = AdamWConfig::new().init();
        let mut optimizer = ZeroOptimizer::new(adam, group, small_buckets(Stage::OptimizerState))?;
        let mut model = optimizer.prepare::<Plain, _>(Net::new(&Default::default()))?;
        for step in 0..3 {
            let loss = model.loss(batch(step, rank, 2));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        Ok(parameters(&model))
    };
    let plain = train_plain(AdamWConfig::new().init(), 3);
    assert!(distance(&plain, &on_ranks(2, train)) < 2e-5);
}

#[test]
fn ranks_with_other_settings_or_models_are_told() {
    let error = on_each_rank(2, |group| {
        let stage = if group.rank() == 0 {
            Stage::OptimizerState
        } else {
            Stage::Gradients
        };
        ZeroOptimizer::new((), group, ZeroSettings::stage(stage)).map(drop)
    });
    for error in error {
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("stage: OptimizerState") && error.contains("stage: Gradients"),
            "{error}"
        );
    }
    let error = on_each_rank(2, |group| {
        let outputs = 3 + group.rank();
        let model = nn::LinearConfig::new(2, outputs).init::<B>(&Default::default());
        let adam = AdamWConfig::new().init();
        ZeroOptimizer::new(adam, group, ZeroSettings::default())?
            .prepare(model)
            .map(drop)
    });
    for error in error {
        let error = error.unwrap_err().to_string();
        assert!(
            error.contains("weight [2, 3]") && error.contains("weight [2, 4]"),
            "{error}"
        );
    }
}

#[test]
fn a_step_without_a_model_says_what_to_do() {
    let group = std::sync::Arc::new(burn_zero::SingleRank::new());
    let mut zero =
        ZeroOptimizer::new(AdamWConfig::new().init(), group, ZeroSettings::default()).unwrap();
    let model = Net::<B>::new(&Default::default());
    let step = std::panic::AssertUnwindSafe(|| zero.step(0.1, model, GradientsParams::new()));
    let panic = std::panic::catch_unwind(step).unwrap_err();
    assert!(
        panic
            .downcast_ref::<String>()
            .unwrap()
            .contains("optimizer.prepare(model)")
    );
}

/// State is by position among the trained parameters: after one is frozen, a layer would get the
/// moments of another.
#[test]
fn state_of_other_parameters_is_refused() {
    fn again<O: Optimizer<ParameterShards<B>, B>>(
        optimizer: impl Fn() -> O + Sync,
        world_size: usize,
    ) -> Option<String> {
        on_ranks(world_size, |group| {
            let settings = ZeroSettings::stage(Stage::OptimizerState);
            let mut zero = ZeroOptimizer::new(optimizer(), group, settings)?;
            let layer = || nn::LinearConfig::new(4, 4).init::<B>(&Default::default());
            let mut layers = zero.prepare::<B, _>(vec![layer(), layer()])?;
            let update = |zero: &mut ZeroOptimizer<O>, layers: Vec<nn::Linear<B>>| {
                let x = Tensor::<B, 2>::ones([2, 4], &Default::default());
                let y = layers.iter().fold(x, |x, layer| layer.forward(x));
                let gradients = GradientsParams::from_grads(y.sum().backward(), &layers);
                zero.step(0.1, layers, gradients)
            };
            layers = update(&mut zero, layers);
            layers[0] = layers[0].clone().no_grad();
            match zero.prepare::<B, _>(layers) {
                Ok(layers) => {
                    update(&mut zero, layers);
                    Ok(None)
                }
                Err(error) => Ok(Some(error.to_string())),
            }
        })
    }
    for world_size in [1, 2] {
        let refused = again(|| AdamWConfig::new().init(), world_size).expect("it has moments");
        assert!(refused.contains("make a new ZeroOptimizer"), "{refused}");
        assert_eq!(again(|| SgdConfig::new().init(), world_size), None);
    }
}
