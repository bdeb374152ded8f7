//! The peak of the gradients, counted by the allocator: alone in its process.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_amp::{Detection, GradScaler};
use burn_flex::Flex;
use burn_zero::{
    GroupOptions, ProcessGroup, Sharded, Sharding, Stage, ThreadGroup, ZeroError, ZeroOptimizer,
};
use peak_alloc::PeakAlloc;

type B = Sharded<Autodiff<Flex>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const RANKS: usize = 4;
const LAYERS: usize = 32;
const WIDTH: usize = 128;
const LAYER_ELEMENTS: usize = WIDTH * WIDTH;
const FLOAT_BYTES: usize = 4;

/// How far the heap of all ranks grows above what it is before the second backward pass.
fn growth_bytes(stage: Stage, scaler: impl Fn() -> GradScaler + Sync) -> usize {
    let grown = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let device = Default::default();
        let sharding = Sharding {
            bucket_elements: LAYER_ELEMENTS,
            ..Sharding::stage(stage)
        };
        let adam = AdamWConfig::new().init();
        let mut optimizer = ZeroOptimizer::new(adam, group.clone(), sharding)?;
        let linear = LinearConfig::new(WIDTH, WIDTH).with_bias(false);
        let model: Vec<Linear<B>> = (0..LAYERS).map(|_| linear.init(&device)).collect();
        let mut model = optimizer.prepare::<B, _>(model)?;
        let mut optimizer = scaler().wrap(optimizer);
        let mut grown = 0;
        for _ in 0..2 {
            let x = Tensor::<B, 2>::ones([1, WIDTH], &device);
            let loss = model
                .iter()
                .fold(x, |x, layer| layer.forward(x).tanh())
                .sum();
            group.barrier("before")?;
            let before = HEAP.current_usage();
            HEAP.reset_peak_usage();
            group.barrier("backward")?;
            let gradients = loss.backward();
            group.barrier("after")?;
            grown = HEAP.peak_usage().saturating_sub(before);
            group.barrier("measured")?;
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = optimizer.step(0.01, model, gradients);
        }
        Ok::<_, ZeroError>(grown)
    });
    grown
        .unwrap()
        .into_iter()
        .map(Result::unwrap)
        .max()
        .unwrap()
}

#[test]
fn the_peak_of_stage_two_is_the_shards_and_a_few_buckets() {
    let whole = RANKS * LAYERS * LAYER_ELEMENTS * FLOAT_BYTES;
    let shards = LAYERS * LAYER_ELEMENTS * FLOAT_BYTES;
    // Of each rank: the gradient at hand; of three buckets under way the gradients and the buffer; what comes back.
    let buckets = RANKS * 8 * LAYER_ELEMENTS * FLOAT_BYTES;

    let one = growth_bytes(Stage::OptimizerState, GradScaler::disabled);
    let two = growth_bytes(Stage::Gradients, GradScaler::disabled);
    // A step that is undone would make leaves whose gradients stay whole.
    let deferred = || GradScaler::default().with_detection(Detection::Deferred);
    let scaled = growth_bytes(Stage::Gradients, deferred);
    println!(
        "stage 1: {one} bytes, stage 2: {two}, with a scaler: {scaled}; whole {whole}, shards {shards}, buckets {buckets}"
    );
    // What the graph holds goes while gradients come.
    assert!(one >= whole * 9 / 10, "{one} of {whole}");
    for two in [two, scaled] {
        assert!(two <= shards + buckets, "{two} of {shards} + {buckets}");
    }
}
