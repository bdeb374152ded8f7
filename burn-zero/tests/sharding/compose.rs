//! With transformers, under autocast and over recomputation.

use burn::backend::Autodiff;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::optim::momentum::MomentumConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer, SgdConfig};
use burn::prelude::*;
use burn_amp::{Autocast, Bf16};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_zero::{Sharded, Stage};

use super::support::*;

const STEPS: usize = 3;
const WIDTH: usize = 7;

/// Three layers; queries, keys and values come from one tensor. Nothing is attached to this thread:
/// plain autodiff.
fn encoder() -> TransformerEncoder<B> {
    let config = TransformerEncoderConfig::new(WIDTH, 11, 1, 3).with_dropout(0.0);
    config.init(&Default::default())
}

fn loss(
    model: &TransformerEncoder<B>,
    step: usize,
    rank: usize,
    world_size: usize,
) -> Tensor<B, 1> {
    let x = values(ROWS * 3 * WIDTH, 200 + step);
    let x = Tensor::<B, 1>::from_data(x.as_slice(), &Default::default());
    let rows = ROWS / world_size;
    let x = x.reshape([ROWS, 3, WIDTH]).narrow(0, rank * rows, rows);
    model
        .forward(TransformerEncoderInput::new(x))
        .square()
        .mean()
}

#[test]
fn a_transformer_on_ranks_is_one_on_all_data() {
    let initial = encoder();
    // Lazy parameters would be others in each clone.
    parameters(&initial);
    // Keys' biases have no gradient but rounding, of which Adam would make whole steps.
    let sgd = SgdConfig::new().with_momentum(Some(MomentumConfig::new()));
    let mut optimizer = sgd.init();
    let mut model = initial.clone();
    for step in 0..STEPS {
        let gradients = GradientsParams::from_grads(loss(&model, step, 0, 1).backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    let plain = parameters(&model);
    for world_size in 2..=4 {
        let train = |stage| {
            on_ranks(world_size, |group| {
                let rank = group.rank();
                let mut optimizer = over_ranks(sgd.init(), group, small_buckets(stage))?;
                let mut model = optimizer.prepare(initial.clone())?;
                for step in 0..STEPS {
                    let loss = loss(&model, step, rank, world_size);
                    let gradients = GradientsParams::from_grads(loss.backward(), &model);
                    model = optimizer.step(0.05, model, gradients)?;
                }
                Ok(parameters(&model))
            })
        };
        let zero = train(Stage::DataParallel);
        let distance = distance(&plain, &zero);
        assert!(distance < 1e-5, "{world_size} ranks: {distance}");
        assert_eq!(zero, train(Stage::OptimizerState), "{world_size} ranks");
        assert_eq!(zero, train(Stage::Gradients), "{world_size} ranks");
    }
}

/// Under bf16 autocast, over recomputation.
type All = Autocast<Sharded<Autodiff<Remat<Flex>>>, Bf16>;

fn train_all(stage: Stage, recompute: bool) -> Vec<Vec<f32>> {
    on_ranks(3, |group| {
        let rank = group.rank();
        let mut optimizer = over_ranks(AdamWConfig::new().init(), group, small_buckets(stage))?;
        let mut model = optimizer.prepare(Net::<All>::new(&Default::default()))?;
        for step in 0..STEPS {
            let x = batch(step, rank, 3);
            let loss = if recompute {
                checkpoint(|| model.loss(x))
            } else {
                model.loss(x)
            };
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(0.05, model, gradients)?;
        }
        Ok(parameters(&model))
    })
}

#[test]
fn autocast_and_recomputation_change_nothing_about_sharding() {
    let zero = train_all(Stage::DataParallel, false);
    let plain = train_plain(AdamWConfig::new().init(), STEPS);
    assert!(distance(&plain, &zero) < 0.2);
    for stage in STAGES {
        for recompute in [false, true] {
            assert_eq!(
                zero,
                train_all(stage, recompute),
                "{stage:?}, recompute: {recompute}"
            );
        }
    }
}
