//! What cannot be sharded exactly is refused with the reason; what can by whole parameters, is.

use burn::backend::Autodiff;
use burn::grad_clipping::GradientClippingConfig;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_accum::ClipByNorm;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{
    Memory, ParameterShards, Partition, RankReduction, ReduceOverRanks, ShardingFault, Stage,
    ZeroSettings,
};

use super::optimizers::{Adaptive, LooksAt, trusting};
use super::support::*;

/// Why the reduction refuses the optimizer in `prepare`; `None` if it does not.
fn refusal<O: Optimizer<ParameterShards<B>, B> + 'static>(
    optimizer: impl Fn() -> O + Sync,
    settings: &ZeroSettings,
) -> Option<ShardingFault> {
    on_ranks(2, |group| {
        let mut update = over_ranks(optimizer(), group, settings.clone())?;
        let Err(error) = update.prepare(Net::<B>::new(&Default::default())) else {
            return Ok(None);
        };
        Ok(Some(
            refused_by_reduction(&error).ok_or(error.clone())?.clone(),
        ))
    })
}

fn refused<O: Optimizer<ParameterShards<B>, B> + 'static>(
    optimizer: impl Fn() -> O + Sync,
    stage: Stage,
) -> ShardingFault {
    refusal(optimizer, &ZeroSettings::stage(stage)).expect("it is refused")
}

#[test]
fn clipping_tensor_by_tensor_is_found() {
    let clipping = Some(GradientClippingConfig::Norm(1.0));
    let config = SgdConfig::new().with_gradient_clipping(clipping);
    let error = refused(|| config.init(), Stage::OptimizerState);
    assert!(
        matches!(error, ShardingFault::NotShardable { .. }),
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
                let mut update = over_ranks(MuonConfig::new().init(), group, sharding.clone())?;
                let mut model = update.prepare(Matrices::<B>::new())?;
                for step in 0..3 {
                    let loss = model.loss(batch(step, rank, world_size));
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = update.step(0.05, model, gradients)?;
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

fn assert_coupled<O: Optimizer<ParameterShards<B>, B> + 'static>(
    sharding: &ZeroSettings,
    optimizer: impl Fn() -> O + Sync,
) {
    let error = refusal(optimizer, sharding);
    assert!(
        matches!(
            error,
            Some(ShardingFault::NotShardable { instead, .. })
                if instead.contains("depends on all it meets")
        ),
        "{sharding:?}: {error:?}"
    );
}

/// It is given the norm over all ranks, unlike an optimizer that clips by what it meets.
#[test]
fn clipping_in_the_update_is_exact() {
    on_ranks(2, |group| {
        let mut update = Update::new(AdamWConfig::new().init())
            .clip_norm(1.0)?
            .reduce(ZeroSettings::default(), group)?;
        update.prepare(Net::<B>::new(&Default::default()))?;
        Ok(())
    });
    let clips = || Adaptive::new(SgdConfig::new().init(), LooksAt::GradientNorm);
    assert_coupled(&ZeroSettings::default(), clips);
}

#[test]
fn a_norm_per_tensor_is_refused_in_pieces() {
    let error = refused(trusting, Stage::OptimizerState);
    assert!(
        matches!(error, ShardingFault::NotShardable { .. }),
        "{error}"
    );
}

#[test]
fn state_that_clones_share_is_refused() {
    let sgd = || Adaptive::new(SgdConfig::new().init(), LooksAt::StepsOfClones);
    let error = refused(sgd, Stage::OptimizerState);
    assert!(
        matches!(error, ShardingFault::NotShardable { .. }),
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
            let mut update = over_ranks(adam, group, sharding.clone())?;
            let refused = update.prepare(Net::<Autodiff<Flex>>::new(&Default::default()));
            let refused = refused.err();
            Ok(refused.as_ref().and_then(refused_by_reduction).cloned())
        });
        let error = error.unwrap();
        assert!(matches!(error, ShardingFault::NotSharded { .. }), "{error}");
    }
}

#[test]
fn stage_one_does_not() {
    let train = |group: std::sync::Arc<dyn burn_zero::ProcessGroup>| {
        let rank = group.rank();
        let adam = AdamWConfig::new().init();
        let mut update = over_ranks(adam, group, small_buckets(Stage::OptimizerState))?;
        let mut model = update.prepare(Net::<Plain>::new(&Default::default()))?;
        for step in 0..3 {
            let loss = model.loss(batch(step, rank, 2));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = update.step(0.05, model, gradients)?;
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
        RankReduction::new(ZeroSettings::stage(stage), group).map(drop)
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
        over_ranks(adam, group, ZeroSettings::default())?
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
    let adam = AdamWConfig::new().init();
    let mut update = over_ranks(adam, group, ZeroSettings::default()).unwrap();
    let model = Net::<B>::new(&Default::default());
    let error = update.step(0.1, model, GradientsParams::new()).unwrap_err();
    assert!(
        error.to_string().contains("update.prepare(model)"),
        "{error}"
    );
}

/// State is by position among the trained parameters: after one is frozen, a layer would get the
/// moments of another.
#[test]
fn state_of_other_parameters_is_refused() {
    fn again<O: Optimizer<ParameterShards<B>, B> + 'static>(
        optimizer: impl Fn() -> O + Sync,
        world_size: usize,
    ) -> Option<String> {
        on_ranks(world_size, |group| {
            let settings = ZeroSettings::stage(Stage::OptimizerState);
            let mut update = over_ranks(optimizer(), group, settings)?;
            let layer = || nn::LinearConfig::new(4, 4).init::<B>(&Default::default());
            let mut layers = update.prepare(vec![layer(), layer()])?;
            let step = |update: &mut Update<_, B>, layers: Vec<nn::Linear<B>>| {
                let x = Tensor::<B, 2>::ones([2, 4], &Default::default());
                let y = layers.iter().fold(x, |x, layer| layer.forward(x));
                let gradients = GradientsParams::from_grads(y.sum().backward(), &layers);
                update.step(0.1, layers, gradients)
            };
            layers = step(&mut update, layers)?;
            layers[0] = layers[0].clone().no_grad();
            match update.prepare(layers) {
                Ok(layers) => {
                    step(&mut update, layers)?;
                    Ok(None)
                }
                Err(error) => Ok(Some(error.to_string())),
            }
        })
    }
    for world_size in [1, 2] {
        let refused = again(|| AdamWConfig::new().init(), world_size).expect("it has moments");
        assert!(refused.contains("make a new update"), "{refused}");
        assert_eq!(again(|| SgdConfig::new().init(), world_size), None);
    }
}
