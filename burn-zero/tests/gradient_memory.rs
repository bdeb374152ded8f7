//! The peak of the gradients, counted by the allocator: alone in its process.

#[path = "support/layers.rs"]
mod layers;

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::nn::Linear;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_amp::GradScaler;
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    Estimate, GroupOptions, ModelStates, ProcessGroup, RankReduction, ReduceOverRanks, Sharded,
    Stage, ThreadGroup, ZeroConfig, estimate,
};
use layers::layers;
use peak_alloc::PeakAlloc;

type B = Sharded<Autodiff<Flex>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const RANKS: usize = 4;
const LAYERS: usize = 32;
const WIDTH: usize = 128;
const LAYER_ELEMENTS: usize = WIDTH * WIDTH;
const FLOAT_BYTES: usize = 4;

/// A bucket a layer.
fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        stage,
        reduce_bucket_size: LAYER_ELEMENTS as u64,
        ..ZeroConfig::default()
    }
}

fn expected(stage: Stage) -> Estimate {
    let model = ModelStates::adam((LAYERS * LAYER_ELEMENTS) as u64);
    estimate(&model, &config(stage), RANKS)
}

/// How far the heap of all ranks grows above what it is before the second backward pass, where the
/// layers are declared in the order in which `declared` has their places in the forward pass.
fn growth_bytes(stage: Stage, scaler: impl Fn() -> GradScaler + Sync, declared: &[usize]) -> usize {
    let grown = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let device = Default::default();
        let reduction = RankReduction::new(config(stage).settings(), group.clone())?;
        let mut update = Update::new(AdamWConfig::new().init())
            .reduce_by(&reduction)?
            .scale(scaler())?;
        let mut model = update.prepare(layers::<B>(LAYERS, WIDTH, 0.2))?;
        let mut grown = 0;
        for _ in 0..2 {
            let x = Tensor::<B, 2>::ones([1, WIDTH], &device);
            let mut used: Vec<_> = declared.iter().zip(&model).collect();
            used.sort_unstable_by_key(|(place, _)| **place);
            let forward = |x, (_, layer): &(_, &Linear<B>)| layer.forward(x).tanh();
            let loss = used.iter().fold(x, forward).sum();
            group.barrier("before")?;
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            group.barrier("backward")?;
            let gradients = loss.backward();
            group.barrier("after")?;
            grown = HEAP.peak_usage().saturating_sub(before);
            group.barrier("measured")?;
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = update.step(0.01, model, gradients)?;
        }
        // What the rank counted itself is within what was expected, too.
        let (counted, most) = (reduction.peak_gradient_bytes(), expected(stage));
        assert!(counted >= most.gradient_bytes, "{counted} of {most:?}");
        assert!(
            counted <= most.peak_gradient_bytes(),
            "{counted} of {most:?}"
        );
        Ok::<_, UpdateError>(grown)
    });
    grown
        .unwrap()
        .into_iter()
        .map(Result::unwrap)
        .max()
        .unwrap()
}

#[test]
fn the_peak_of_stage_two_is_the_shards_and_three_buckets() {
    let whole = RANKS * LAYERS * LAYER_ELEMENTS * FLOAT_BYTES;
    // Of each rank: its shard, the gradients of three buckets and the buffer of one, and what that
    // becomes on this rank.
    let Estimate {
        gradient_bytes,
        underway_bytes,
        buffer_bytes,
        ..
    } = expected(Stage::Gradients);
    let part = buffer_bytes / RANKS as u64;
    let most = RANKS * (gradient_bytes + underway_bytes + buffer_bytes + part) as usize;
    assert!(most * 5 / 2 < whole, "most of it is beyond what is allowed");

    let in_use: Vec<usize> = (0..LAYERS).collect();
    let one = growth_bytes(Stage::OptimizerState, GradScaler::disabled, &in_use);
    let two = growth_bytes(Stage::Gradients, GradScaler::disabled, &in_use);
    let scaled = growth_bytes(Stage::Gradients, GradScaler::default, &in_use);
    // As Burn's text examples do, in which the first layers are declared last; from the last to the
    // first; in no order.
    let mut embeddings_last = in_use.clone();
    embeddings_last.rotate_left(LAYERS / 4);
    let mut reversed = in_use.clone();
    reversed.reverse();
    let shuffled: Vec<_> = in_use.iter().map(|place| place * 13 % LAYERS).collect();
    let declared = [embeddings_last, reversed, shuffled];
    let declared =
        declared.map(|order| growth_bytes(Stage::Gradients, GradScaler::disabled, &order));
    println!(
        "stage 1: {one} bytes, stage 2: {two}, with a scaler: {scaled}, declared otherwise: {declared:?}; whole {whole}, at most {most}"
    );
    // What the graph holds goes while gradients come.
    assert!(one >= whole * 9 / 10, "{one} of {whole}");
    for two in [two, scaled].into_iter().chain(declared) {
        assert!(two <= most, "{two} of {most}");
    }
}
