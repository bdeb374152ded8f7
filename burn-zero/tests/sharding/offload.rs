//! Each rank's part of the state on its host.

use core::ops::Range;
use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, Bf16, GradScaler, GradScalerConfig};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    HostAdamWConfig, Memory, OffloadConfig, OffloadedAdamW, ParameterShards, ProcessGroup,
    ReduceOverRanks, Sharded, Stage, Training, ZeroSettings,
};
use tempfile::tempdir;

use super::bytes::tensor_bytes;
use super::support::*;

const STEPS: usize = 5;

/// Burn's defaults.
fn config() -> OffloadConfig {
    let adamw = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 1e-4,
        ..Default::default()
    };
    OffloadConfig::new(adamw)
}

fn on_host() -> OffloadedAdamW {
    config().init().unwrap()
}

/// Gradients that stay in host memory until they are updated with.
fn kept_there(stage: Stage) -> ZeroSettings {
    ZeroSettings {
        gradients: Memory::Host,
        ..small_buckets(stage)
    }
}

#[test]
fn stages_are_one_another_bit_for_bit_and_one_rank_is_the_optimizer_alone() {
    let alone = train_plain(config().init().unwrap(), STEPS);
    let burns = train_plain(AdamWConfig::new().init(), STEPS);
    assert!(distance(&burns, &alone) < 2e-5);
    for stage in STAGES {
        for sharding in [small_buckets(stage), kept_there(stage)] {
            let one = train_sharded(1, &sharding, on_host, STEPS);
            assert_eq!(alone, one, "{sharding:?}");
        }
    }
    for world_size in 2..=4 {
        let train = |stage| train_sharded(world_size, &small_buckets(stage), on_host, STEPS);
        let zero = train(Stage::DataParallel);
        let distance_to_one = distance(&alone, &zero);
        assert!(
            distance_to_one < 2e-5,
            "{world_size} ranks: {distance_to_one}"
        );
        assert_eq!(zero, train(Stage::OptimizerState), "{world_size} ranks");
        assert_eq!(zero, train(Stage::Gradients), "{world_size} ranks");
        for stage in STAGES {
            let kept = train_sharded(world_size, &kept_there(stage), on_host, STEPS);
            assert_eq!(zero, kept, "{world_size} ranks, {stage}");
        }
    }
}

#[test]
fn each_rank_holds_its_part() {
    let elements = on_each_rank(4, |group| {
        let rank = group.rank();
        let sharding = small_buckets(Stage::Gradients);
        let mut update = over_ranks(on_host(), group, sharding).unwrap();
        let model = update.prepare(Net::<B>::new(&Default::default())).unwrap();
        let gradients = update.backward(&model, model.loss(batch(0, rank, 4)));
        update.step(0.05, model, gradients).unwrap();
        let moments = tensor_bytes(update.record());
        moments as usize / (2 * size_of::<f32>())
    });
    let on_hosts: usize = elements.iter().sum();
    assert_eq!(on_hosts, 77 + 11 + 33 + 3 + 143);
    for host in elements {
        assert!(host <= on_hosts / 4 + 40, "{host} of {on_hosts}");
    }
}

#[test]
fn all_ranks_skip_and_accumulate_as_on_the_device() {
    fn train<O>(
        group: Arc<dyn ProcessGroup>,
        sharding: ZeroSettings,
        inner: O,
    ) -> Result<(u64, Vec<Vec<f32>>), UpdateError>
    where
        O: Optimizer<ParameterShards<B>, B> + 'static,
    {
        let rank = group.rank();
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let mut update = Update::new(inner)
            .clip_norm(1e30)? // which no norm exceeds: what it multiplies with is 1
            .reduce(sharding, group)?
            .accumulate(AccumConfig::mean(2))?
            .scale(scaler.clone())?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..8 {
            let mut loss = model.loss(batch(step, rank, 2));
            if step == 3 && rank == 1 {
                loss = loss * f32::INFINITY;
            }
            let gradients = update.backward(&model, loss);
            model = update.step(0.05, model, gradients)?;
        }
        Ok((scaler.skipped_steps(), parameters(&model)))
    }
    for stage in STAGES {
        let sharding = small_buckets(stage);
        let host = on_ranks(2, |group| train(group, sharding.clone(), on_host()));
        let device = on_ranks(2, |group| {
            train(group, sharding.clone(), AdamWConfig::new().init())
        });
        assert_eq!(host.0, 1);
        let kept = on_ranks(2, |group| train(group, kept_there(stage), on_host()));
        assert_eq!(host, kept, "{stage}");
        assert!(distance(&device.1, &host.1) < 2e-5, "{stage:?}");
    }
}

#[test]
fn weights_that_are_loaded_and_prepared_again_are_followed() {
    fn run<O>(inner: impl Fn() -> O + Sync) -> Vec<Vec<f32>>
    where
        O: Optimizer<ParameterShards<B>, B> + 'static,
    {
        on_ranks(2, |group| {
            let rank = group.rank();
            let sharding = small_buckets(Stage::OptimizerState);
            let mut update = over_ranks(inner(), group, sharding)?;
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            for step in 0..6 {
                if step == 3 {
                    model = update.prepare(Net::new(&Default::default()))?;
                }
                let gradients = update.backward(&model, model.loss(batch(step, rank, 2)));
                model = update.step(0.05, model, gradients)?;
            }
            Ok(parameters(&model))
        })
    }
    // On the device there is nothing to follow.
    let on_device = run(|| AdamWConfig::new().init());
    assert!(distance(&on_device, &run(on_host)) < 2e-5);
}

/// Whole numbers, whose sums are exact.
#[derive(Module, Debug)]
struct Rows<B: Backend> {
    weight: Param<Tensor<B, 2>>,
}

#[test]
fn swapped_rows_are_noticed() {
    /// Expected are the exchanged rows, after a step at a learning rate of 0.
    fn run<O: Optimizer<ParameterShards<B>, B> + 'static>(
        world_size: usize,
        stage: Stage,
        optimizer: impl Fn() -> O + Sync,
    ) {
        let found = on_ranks(world_size, |group| {
            let mut update = over_ranks(optimizer(), group, small_buckets(stage))?;
            let rows = Tensor::<B, 1, Int>::arange(0..66, &Default::default());
            let weight = Param::from_tensor(rows.float().reshape([11, 6]));
            let mut model = update.prepare(Rows { weight })?;
            for step in 0..3 {
                if step == 2 {
                    model.weight = model
                        .weight
                        .map(|rows| rows.flip([0]).detach().require_grad());
                }
                let gradients = update.backward(&model, model.weight.val().sum());
                model = update.step(0.0, model, gradients)?;
            }
            Ok(parameters(&model))
        });
        let rows = (0..11).rev().flat_map(|row| 6 * row..6 * row + 6);
        let expected: Vec<_> = rows.map(|value| value as f32).collect();
        assert_eq!(found, [expected], "{world_size} ranks, {stage}");
    }
    for stage in STAGES {
        for world_size in [1, 2] {
            run(world_size, stage, on_host);
        }
    }
}

/// Under bf16 autocast, over recomputation.
type All = Autocast<Sharded<Autodiff<Remat<Flex>>>, Bf16>;

#[test]
fn it_composes_with_autocast_and_recomputation() {
    fn train<O: Optimizer<ParameterShards<All>, All> + 'static>(
        stage: Stage,
        optimizer: impl Fn() -> O + Sync,
    ) -> Vec<Vec<f32>> {
        train_with(&small_buckets(stage), optimizer)
    }
    fn train_with<O: Optimizer<ParameterShards<All>, All> + 'static>(
        sharding: &ZeroSettings,
        optimizer: impl Fn() -> O + Sync,
    ) -> Vec<Vec<f32>> {
        on_ranks(2, |group| {
            let rank = group.rank();
            let mut update = over_ranks(optimizer(), group, sharding.clone())?;
            let mut model = update.prepare(Net::<All>::new(&Default::default()))?;
            for step in 0..STEPS {
                let loss = checkpoint(|| model.loss(batch(step, rank, 2)));
                let gradients = update.backward(&model, loss);
                model = update.step(0.01, model, gradients)?;
            }
            Ok(parameters(&model))
        })
    }
    let adamw = AdamWConfig::new();
    let on_device = train(Stage::Gradients, || adamw.init());
    let zero = train(Stage::DataParallel, || config().init().unwrap());
    assert_eq!(zero, train(Stage::Gradients, || config().init().unwrap()));
    for stage in STAGES {
        let kept = train_with(&kept_there(stage), || config().init().unwrap());
        assert_eq!(zero, kept, "{stage}");
    }
    // Rounding of a weight may turn a bf16 activation by its last bit.
    let distance = distance(&on_device, &zero);
    assert!(distance < 1e-2, "{distance}");
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
    fn step(self, update: &mut Update<Self, B>, step: usize) -> Result<Self, UpdateError> {
        let device = Default::default();
        let low = Tensor::<B, 1>::from_data(values(66, 10 + step).as_slice(), &device);
        let low = low.reshape([6, 11]).cast(DType::BF16);
        let loss = (self.weight.val() * low).sum().cast(DType::F32)
            + (self.full.val() * (step as f32 + 1.0)).sum();
        let gradients = update.backward(&self, loss);
        update.step(1e-3, self, gradients)
    }
}

#[test]
fn masters_of_low_precision_go_to_another_number_of_ranks() {
    let dir = tempdir().unwrap();
    let run = |world_size: usize, steps: Range<usize>| {
        on_ranks(world_size, |group| {
            let sharding = small_buckets(Stage::Gradients);
            let (mut update, reduction) = reduced(on_host(), group, sharding)?;
            let model = update.prepare(Low::<B>::new())?;
            let recorder = reduction.recorder()?;
            let training = Training {
                model,
                optimizer: update,
                scheduler: 1e-3,
            };
            let resumed = recorder.load::<B, _, _, _>(dir.path(), None, training);
            let (mut training, found) = resumed.unwrap();
            for step in steps.clone() {
                training.model = training.model.step(&mut training.optimizer, step)?;
                if found.is_none() && step == 2 {
                    let state = TrainingState::at_step(3);
                    let saved = training.by_ref();
                    recorder
                        .save::<B, _, _, _>(dir.path(), saved, state, Keep::All)
                        .unwrap();
                }
            }
            Ok(parameters(&training.model))
        })
    };
    let expected = run(2, 0..9);
    let (saved, _) = contents(dir.path());
    assert!(
        saved.contains_key("optimizer/weight.V1.Rank1.master"),
        "{:?}",
        saved.keys()
    );
    assert_eq!(expected, run(1, 3..9));
}
