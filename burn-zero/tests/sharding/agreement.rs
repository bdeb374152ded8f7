//! What one rank finds, all decide.

use std::sync::Arc;

use burn::optim::{AdamWConfig, SgdConfig};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, Accumulation, ClipNorm};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_update::{Update, UpdateError};
use burn_zero::{ProcessGroup, ReduceOverRanks, Stage, ZeroSettings};

use super::support::*;

const STEPS: usize = 5;

/// Steps of an update with a scale, of which rank 1 overflows in the third.
fn overflow_once<A: AutodiffBackend>(stage: Stage, world_size: usize) {
    let train = |group: Arc<dyn ProcessGroup>| {
        let rank = group.rank();
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let adam = AdamWConfig::new().init();
        let update = over_ranks(adam, group, small_buckets(stage))?;
        let mut update = update.scale(scaler.clone())?;
        let mut model = update.prepare(Net::<A>::new(&Default::default()))?;
        let mut seen = Vec::new();
        for step in 0..STEPS {
            let mut loss = model.loss(batch(step, rank, world_size));
            if step == 2 && rank == 1 {
                loss = loss * f32::INFINITY;
            }
            let gradients = update.backward(&model, loss);
            let before = parameters(&model);
            model = update.step(0.05, model, gradients)?;
            seen.push((scaler.scale(), before == parameters(&model)));
        }
        Ok((seen, scaler.skipped_steps(), parameters(&model)))
    };
    let (seen, skipped, _) = on_ranks(world_size, train);
    assert_eq!(skipped, 1, "{stage:?}");
    let scales = [65536.0, 65536.0, 32768.0, 32768.0, 32768.0];
    for (step, ((scale, unchanged), expected)) in seen.into_iter().zip(scales).enumerate() {
        assert_eq!(
            (scale, unchanged),
            (expected, step == 2),
            "{stage:?}, step {step}"
        );
    }
}

#[test]
fn one_rank_overflows_and_all_skip() {
    for stage in STAGES {
        for world_size in 2..=3 {
            overflow_once::<Autocast<B, F16>>(stage, world_size);
        }
    }
}

/// Stages 0 and 1 need no `Sharded`, and a skip on one rank is one on all there too.
#[test]
fn so_they_do_on_burns_backend() {
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        overflow_once::<Autocast<Plain, F16>>(stage, 2);
    }
}

/// Finite micro-batches whose sum overflows on one rank only: the window is skipped on all.
#[test]
fn a_window_that_overflows_on_one_rank_is_skipped_on_all() {
    for stage in STAGES {
        let (seen, skipped) = on_ranks(2, |group| {
            let rank = group.rank();
            let sgd = SgdConfig::new().init();
            let windows = Accumulation::new(AccumConfig::mean(2)).unwrap();
            let counter = windows.updates();
            let update = over_ranks(sgd, group, small_buckets(stage))?;
            let mut update = update.accumulate(windows)?;
            let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
            let mut seen = Vec::new();
            for step in 0..4 {
                let mut loss = model.loss(batch(step / 2, rank, 2));
                if step < 2 && rank == 1 {
                    // The gradient of one element, f32's largest number (of the mean over ranks:
                    // half of it, in both).
                    loss = loss + model.sometimes.val().narrow(0, 0, 1) * f32::MAX;
                }
                let gradients = update.backward(&model, loss);
                let before = parameters(&model);
                model = update.step(1e-3, model, gradients)?;
                seen.push(before != parameters(&model));
            }
            Ok((seen, counter.skipped_updates()))
        });
        let overflows = stage != Stage::Gradients; // which halves each before they are added up
        assert_eq!(seen, [false, !overflows, false, true], "{stage:?}");
        assert_eq!(skipped, u64::from(overflows), "{stage:?}");
    }
}

#[test]
fn the_rank_that_did_not_overflow_knows_the_culprits_too() {
    for stage in STAGES {
        let train = |group: Arc<dyn ProcessGroup>| {
            let rank = group.rank();
            let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
            let adam = AdamWConfig::new().init();
            let update = over_ranks(adam, group, small_buckets(stage))?;
            let mut update = update.scale(scaler.clone())?;
            let model = update.prepare(Net::<B>::new(&Default::default()))?;
            // Only this parameter's gradient is non-finite, and only here.
            let factor = if rank == 1 { f32::NAN } else { 1.0 };
            let loss = model.loss(batch(0, rank, 2)) + model.sometimes.val().sum() * factor;
            let gradients = update.backward(&model, loss);
            update.step(0.05, model, gradients)?;
            Ok(scaler.last_overflow().unwrap().parameters)
        };
        assert_eq!(on_ranks(2, train), ["sometimes"], "{stage:?}");
    }
}

/// Four micro-batches a window; on request, rank 1 has a NaN in the second of them.
fn accumulate(world_size: usize, stage: Stage, poisoned: bool) -> (Vec<Vec<f32>>, u64) {
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let windows = Accumulation::new(AccumConfig::mean(4)).unwrap();
        let counter = windows.updates();
        let update = over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?;
        let mut update = update.accumulate(windows)?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..8 {
            let mut loss = model.loss(batch(step, rank, world_size));
            if poisoned && step == 1 && rank == 1 {
                loss = loss * f32::NAN;
            }
            let gradients = update.backward(&model, loss);
            model = update.step(0.05, model, gradients)?;
        }
        assert_eq!(counter.updates(), 2);
        Ok((parameters(&model), counter.dropped()))
    })
}

#[test]
fn accumulation_is_that_of_one_rank() {
    let update = Update::new(AdamWConfig::new().init());
    let plain = train_plain(update.accumulate(AccumConfig::mean(4)).unwrap(), 8);
    for world_size in 2..=4 {
        let zero = accumulate(world_size, Stage::DataParallel, false);
        assert!(distance(&plain, &zero.0) < 2e-5);
        // Sums of means are not means of sums: stage 2 reduces each micro-batch.
        assert_eq!(zero, accumulate(world_size, Stage::OptimizerState, false));
        assert!(distance(&plain, &accumulate(world_size, Stage::Gradients, false).0) < 2e-5);
    }
}

#[test]
fn a_micro_batch_that_is_bad_on_one_rank_is_dropped_on_all() {
    for stage in STAGES {
        let (_, dropped) = accumulate(3, stage, true);
        assert_eq!(dropped, 1, "{stage:?}");
    }
}

#[test]
fn clipping_is_by_the_norm_over_all_ranks() {
    let clip = ClipNorm::new(0.01).unwrap();
    let norm = clip.norm();
    let update = Update::new(AdamWConfig::new().init()).clip(clip);
    let plain = train_plain(update.unwrap(), STEPS);
    let expected = norm.last().unwrap();
    for world_size in 1..=4 {
        let train = |stage| {
            on_ranks(world_size, |group| {
                let rank = group.rank();
                let clip = ClipNorm::new(0.01).unwrap();
                let norm = clip.norm();
                let mut update = Update::new(AdamWConfig::new().init())
                    .clip(clip)?
                    .reduce(small_buckets(stage), group)?;
                let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
                for step in 0..STEPS {
                    let loss = model.loss(batch(step, rank, world_size));
                    let gradients = update.backward(&model, loss);
                    model = update.step(0.05, model, gradients)?;
                }
                Ok((parameters(&model), norm.last().unwrap()))
            })
        };
        let zero = train(Stage::DataParallel);
        assert!(
            (zero.1 / expected - 1.0).abs() < 1e-5,
            "{} {expected}",
            zero.1
        );
        assert!(distance(&plain, &zero.0) < 2e-5);
        assert_eq!(zero, train(Stage::OptimizerState), "{world_size} ranks");
        assert_eq!(zero, train(Stage::Gradients), "{world_size} ranks");
    }
}

#[test]
fn ranks_that_do_not_skip_alike_are_told() {
    let results = burn_zero::ThreadGroup::spawn(2, Default::default(), |group| {
        let rank = group.rank();
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let sharding = ZeroSettings::stage(Stage::OptimizerState);
        let mut update = over_ranks(AdamWConfig::new().init(), group.clone(), sharding)?;
        let model = update.prepare(Net::<B>::new(&Default::default()))?;
        let gradients = update.backward(&model, model.loss(batch(0, rank, 2)));
        if rank == 0 {
            let stepped = update.step(0.05, model, gradients);
            drop(stepped.unwrap_or_else(|error| panic!("{error}")));
            return Ok(());
        }
        Ok::<_, UpdateError>(group.barrier("the end")?)
    });
    let error = results.unwrap_err().to_string();
    assert!(
        error.contains("gradients of bucket 0") && error.contains("the end"),
        "{error}"
    );
}
