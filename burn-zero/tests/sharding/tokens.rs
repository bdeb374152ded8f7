//! Ranks whose micro-batches hold different numbers of items.

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_accum::{AccumConfig, Counted};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_zero::{ReduceOp, Stage, ZeroSettings};

use super::support::*;

const WINDOW: usize = 2;
const STEPS: usize = 3 * WINDOW;

/// The rows of a rank: of 12 one, two and so on, and the last rank the rest, turned by one each
/// step.
fn uneven<A: Backend>(step: usize, rank: usize, world_size: usize) -> Tensor<A, 2> {
    let of = |rank: usize| match (rank + step) % world_size {
        last if last + 1 == world_size => ROWS - last * (last + 1) / 2,
        other => other + 1,
    };
    let first: usize = (0..rank).map(of).sum();
    batch::<A>(step, 0, 1).narrow(0, first, of(rank))
}

/// Windows of unequal micro-batches of one rank: all losses summed, divided by all rows.
fn plain() -> Vec<Vec<f32>> {
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Net::<Plain>::new(&Default::default());
    for window in 0..STEPS / WINDOW {
        let rows = (0..WINDOW).map(|step| batch(window * WINDOW + step, 0, 1));
        let loss = model.loss(Tensor::cat(rows.collect(), 0));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    parameters(&model)
}

fn sharded(world_size: usize, stage: Stage, reduction: ReduceOp) -> Vec<Vec<f32>> {
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let sharding = ZeroSettings {
            reduction,
            ..small_buckets(stage)
        };
        let update = over_ranks(AdamWConfig::new().init(), group, sharding)?;
        let mut update = update.accumulate(AccumConfig::tokens(WINDOW))?;
        let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
        for step in 0..STEPS {
            let rows = uneven(step, rank, world_size);
            let [items, _] = rows.dims();
            let loss = Counted::mean(model.loss(rows), items);
            let gradients = update.backward(&model, loss);
            model = update.step(0.05, model, gradients)?;
        }
        Ok(parameters(&model))
    })
}

#[test]
fn the_update_is_that_of_all_items_of_all_ranks() {
    let plain = plain();
    for world_size in 1..=4 {
        for stage in STAGES {
            for reduction in [ReduceOp::Mean, ReduceOp::Sum] {
                let sharded = sharded(world_size, stage, reduction);
                let distance = distance(&plain, &sharded);
                assert!(
                    distance < 2e-5,
                    "{world_size} ranks, {stage:?}, {reduction}: {distance}"
                );
            }
        }
    }
}

/// In f16, with so many items a row that scale and items together exceed its range.
#[test]
fn many_items_take_none_of_the_range_of_f16() {
    type Half = Autocast<B, F16>;
    let train = |world_size, stage| {
        on_ranks(world_size, |group| {
            let rank = group.rank();
            let scaler = GradScaler::new(GradScalerConfig::fixed(1024.0)).unwrap();
            let mut update = over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?
                .accumulate(AccumConfig::tokens(WINDOW))?
                .scale(scaler.clone())?;
            let mut model = update.prepare(Net::<Half>::new(&Default::default()))?;
            for step in 0..STEPS {
                let rows = uneven(step, rank, world_size);
                let [items, _] = rows.dims();
                let loss = Counted::mean(model.loss(rows), items * 65_536);
                let gradients = update.backward(&model, loss);
                model = update.step(0.05, model, gradients)?;
            }
            assert_eq!(scaler.skipped_steps(), 0);
            Ok(parameters(&model))
        })
    };
    let plain = plain();
    for world_size in 1..=3 {
        let reference = train(world_size, Stage::DataParallel);
        let to_plain = distance(&plain, &reference);
        assert!(to_plain < 1e-2, "{world_size} ranks: {to_plain}");
        for stage in STAGES {
            let distance = distance(&train(world_size, stage), &reference);
            assert!(distance < 2e-5, "{world_size} ranks, {stage:?}: {distance}");
        }
    }
}
