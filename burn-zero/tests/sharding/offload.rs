//! Each rank's part of the state on its host.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn::tensor::DType;
use burn_accum::{AccumConfig, MultiSteps};
use burn_amp::{Autocast, Bf16, GradScaler, GradScalerConfig};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_zero::{
    HostAdamWConfig, OffloadConfig, OffloadedAdamW, ProcessGroup, Sharded, Shards, Stage,
    ZeroOptimizer, offload,
};

use super::state::{part, put_together};
use super::support::*;

const STEPS: usize = 5;

/// Burn's defaults.
fn config(ratio: f64) -> OffloadConfig {
    let adamw = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 1e-4,
        ..Default::default()
    };
    OffloadConfig {
        ratio,
        ..OffloadConfig::new(adamw)
    }
}

fn on_host(ratio: f64) -> OffloadedAdamW<B> {
    config(ratio).init().unwrap()
}

#[test]
fn stages_are_one_another_bit_for_bit_and_one_rank_is_the_optimizer_alone() {
    let alone = train_plain(config(1.0).init::<Plain>().unwrap(), STEPS);
    let burns = train_plain(AdamWConfig::new().init(), STEPS);
    assert!(distance(&burns, &alone) < 2e-5);
    for stage in STAGES {
        let one = train_sharded(1, &small_buckets(stage), || on_host(1.0), STEPS);
        assert_eq!(alone, one, "{stage:?}");
    }
    for world_size in 2..=4 {
        let train = |stage, ratio| {
            train_sharded(world_size, &small_buckets(stage), || on_host(ratio), STEPS)
        };
        let zero = train(Stage::DataParallel, 1.0);
        let distance_to_one = distance(&alone, &zero);
        assert!(
            distance_to_one < 2e-5,
            "{world_size} ranks: {distance_to_one}"
        );
        assert_eq!(
            zero,
            train(Stage::OptimizerState, 1.0),
            "{world_size} ranks"
        );
        assert_eq!(zero, train(Stage::Gradients, 1.0), "{world_size} ranks");
        let half = train(Stage::Gradients, 0.5);
        assert!(distance(&zero, &half) < 2e-5, "{world_size} ranks");
    }
}

#[test]
fn other_optimizers_are_themselves_bit_for_bit() {
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    for stage in STAGES {
        let sharding = small_buckets(stage);
        let on_device = train_sharded(3, &sharding, || sgd.init(), STEPS);
        let on_host = train_sharded(3, &sharding, || offload::<Flex, _>(sgd.init()), STEPS);
        assert_eq!(on_device, on_host, "{stage:?}");
    }
}

#[test]
fn each_rank_holds_its_part() {
    let elements = on_each_rank(4, |group| {
        let rank = group.rank();
        let sharding = small_buckets(Stage::Gradients);
        let mut optimizer = ZeroOptimizer::new(on_host(1.0), group, sharding).unwrap();
        let model = optimizer
            .prepare::<B, _>(Net::new(&Default::default()))
            .unwrap();
        let loss = model.loss(batch(0, rank, 4));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        let _ = optimizer.step(0.05, model, gradients);
        optimizer.inner().elements()
    });
    let on_hosts: usize = elements.iter().map(|(host, _)| host).sum();
    assert_eq!(on_hosts, 77 + 11 + 33 + 3 + 143);
    for (host, device) in elements {
        assert_eq!(device, 0);
        assert!(host <= on_hosts / 4 + 40, "{host} of {on_hosts}");
    }
}

#[test]
fn all_ranks_skip_and_accumulate_as_on_the_device() {
    fn train<O>(group: Arc<dyn ProcessGroup>, stage: Stage, inner: O) -> (u64, Vec<Vec<f32>>)
    where
        O: Optimizer<Shards<B>, B>,
    {
        let rank = group.rank();
        let mut zero = ZeroOptimizer::new(inner, group, small_buckets(stage)).unwrap();
        let mut model = zero.prepare::<B, _>(Net::new(&Default::default())).unwrap();
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let mut optimizer = scaler.wrap(MultiSteps::new(zero, AccumConfig::mean(2)).unwrap());
        for step in 0..8 {
            let mut loss = model.loss(batch(step, rank, 2));
            if step == 3 && rank == 1 {
                loss = loss * f32::INFINITY;
            }
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients);
        }
        (scaler.skipped_steps(), parameters(&model))
    }
    for stage in STAGES {
        let host = on_ranks(2, |group| Ok(train(group, stage, on_host(1.0))));
        let device = on_ranks(2, |group| {
            Ok(train(group, stage, AdamWConfig::new().init()))
        });
        assert_eq!(host.0, 1);
        assert!(distance(&device.1, &host.1) < 2e-5, "{stage:?}");
    }
}

#[test]
fn weights_that_are_loaded_and_prepared_again_are_followed() {
    let run = |ratio: f64| {
        on_ranks(2, |group| {
            let rank = group.rank();
            let sharding = small_buckets(Stage::OptimizerState);
            let mut optimizer = ZeroOptimizer::new(on_host(ratio), group, sharding)?;
            let mut model = optimizer.prepare::<B, _>(Net::new(&Default::default()))?;
            for step in 0..6 {
                if step == 3 {
                    model = optimizer.prepare::<B, _>(Net::new(&Default::default()))?;
                }
                let loss = model.loss(batch(step, rank, 2));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = optimizer.step(0.05, model, gradients);
            }
            Ok(parameters(&model))
        })
    };
    // On the device there is nothing to follow.
    assert!(distance(&run(0.0), &run(1.0)) < 2e-5);
}

/// Under bf16 autocast, over recomputation.
type All = Autocast<Sharded<Autodiff<Remat<Flex>>>, Bf16>;

#[test]
fn it_composes_with_autocast_and_recomputation() {
    fn train<O: Optimizer<Shards<All>, All>>(
        stage: Stage,
        optimizer: impl Fn() -> O + Sync,
    ) -> Vec<Vec<f32>> {
        on_ranks(2, |group| {
            let rank = group.rank();
            let mut zero = ZeroOptimizer::new(optimizer(), group, small_buckets(stage))?;
            let mut model = zero.prepare::<All, _>(Net::new(&Default::default()))?;
            for step in 0..STEPS {
                let loss = checkpoint(|| model.loss(batch(step, rank, 2)));
                let gradients = GradientsParams::from_grads(loss.backward(), &model);
                model = zero.step(0.01, model, gradients);
            }
            Ok(parameters(&model))
        })
    }
    let adamw = AdamWConfig::new();
    let on_device = train(Stage::Gradients, || adamw.init());
    let zero = train(Stage::DataParallel, || config(1.0).init().unwrap());
    assert_eq!(
        zero,
        train(Stage::Gradients, || config(1.0).init().unwrap())
    );
    // Rounding of a weight may turn a bf16 activation by its last bit.
    let distance = distance(&on_device, &zero);
    assert!(distance < 1e-2, "{distance}");
    let on_host = train(Stage::Gradients, || offload::<Flex, _>(adamw.init()));
    assert_eq!(on_device, on_host);
}

/// A model in bf16: its masters are state.
#[derive(Module, Debug)]
struct Low<B: Backend> {
    weight: Param<Tensor<B, 2>>,
    full: Param<Tensor<B, 1>>,
}

impl Low<B> {
    fn new() -> Self {
        let device = Default::default();
        let weight = Tensor::<B, 1>::from_data(values(66, 1).as_slice(), &device);
        let full = Tensor::<B, 1>::from_data(values(9, 2).as_slice(), &device);
        Self {
            weight: Param::from_tensor(weight.reshape([6, 11]).cast(DType::BF16)),
            full: Param::from_tensor(full),
        }
    }

    /// The same gradients on every rank.
    fn step(self, optimizer: &mut ZeroOptimizer<OffloadedAdamW<B>>, step: usize) -> Self {
        let device = Default::default();
        let low = Tensor::<B, 1>::from_data(values(66, 10 + step).as_slice(), &device);
        let low = low.reshape([6, 11]).cast(DType::BF16);
        let loss = (self.weight.val() * low).sum().cast(DType::F32)
            + (self.full.val() * (step as f32 + 1.0)).sum();
        let gradients = GradientsParams::from_grads(loss.backward(), &self);
        optimizer.step(1e-3, self, gradients)
    }
}

#[test]
fn masters_of_low_precision_go_to_another_number_of_ranks() {
    for ratio in [0.0, 1.0] {
        let runs = on_each_rank(2, |group| {
            let sharding = small_buckets(Stage::Gradients);
            let mut optimizer = ZeroOptimizer::new(on_host(ratio), group, sharding).unwrap();
            let mut model = optimizer.prepare::<B, _>(Low::new()).unwrap();
            for step in 0..3 {
                model = model.step(&mut optimizer, step);
            }
            let saved = (optimizer.to_state::<B>().unwrap(), model.clone());
            for step in 3..9 {
                model = model.step(&mut optimizer, step);
            }
            (saved, parameters(&model))
        });
        let (states, expected): (Vec<_>, Vec<_>) = runs.into_iter().unzip();
        let (states, models): (Vec<_>, Vec<_>) = states.into_iter().unzip();
        let whole = put_together(&states);
        assert!(
            whole.contains_key("weight.V1.Rank1.master"),
            "{:?}",
            whole.keys()
        );
        let resumed = on_ranks(1, |group| {
            let sharding = small_buckets(Stage::Gradients);
            let mut optimizer = ZeroOptimizer::new(on_host(ratio), group, sharding)?;
            let mut model = optimizer.prepare::<B, _>(models[0].clone())?;
            let slots = optimizer.state_slots(&states[0].rest)?;
            let state = part(&slots, &whole, &states[0].rest);
            optimizer.load_state::<B>(state, &Default::default())?;
            for step in 3..9 {
                model = model.step(&mut optimizer, step);
            }
            Ok(parameters(&model))
        });
        assert_eq!(expected[0], resumed, "ratio {ratio}");
    }
}
