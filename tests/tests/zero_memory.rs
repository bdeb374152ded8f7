//! A GPT that does not fit a rank unless gradients are sharded. The allocator counts the bytes, so the test is alone in its process.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::{Int, Tensor};
use burn_flex::Flex;
use burn_zero::{
    GroupOptions, ProcessGroup, Sharded, Stage, ThreadGroup, ZeroError, ZeroOptimizer, ZeroSettings,
};
use examples::gpt::model::{Gpt, GptConfig};
use peak_alloc::PeakAlloc;

type B = Sharded<Autodiff<Flex>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const RANKS: usize = 8;
const TIME: usize = 4;
const VOCABULARY: usize = 32;
const FLOAT_BYTES: usize = 4;
/// The bytes that a rank may hold for each byte of its parameters: parameters, unsharded gradients and the shard of the
/// optimizer's state exceed it.
const LIMIT: f64 = 2.2;

fn loss(model: &Gpt<B>) -> Tensor<B, 1> {
    let device = Default::default();
    let tokens = Tensor::<B, 1, Int>::arange(0..TIME as i64 + 1, &device);
    let logits = model.forward(tokens.clone().narrow(0, 0, TIME).reshape([1, TIME]));
    let logits = logits.reshape([TIME, VOCABULARY]);
    let loss = CrossEntropyLossConfig::new().init(&device);
    loss.forward(logits, tokens.narrow(0, 1, TIME))
}

/// Trains. Returns the peak of a rank, in bytes for each byte of its parameters, and the first and the last loss.
fn train(initial: &Gpt<B>, stage: Stage) -> (f64, [f32; 2]) {
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let trained = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let sharding = ZeroSettings {
            bucket_elements: 10_000,
            ..ZeroSettings::stage(stage)
        };
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let mut optimizer = ZeroOptimizer::new(AdamWConfig::new().init(), group.clone(), sharding)?;
        let mut model = optimizer.prepare::<B, _>(initial.clone())?;
        group.barrier("the model is there")?;
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = loss(&model);
            losses.push(loss.clone().into_scalar());
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(1e-3, model, gradients);
            group.barrier("the step is done")?;
        }
        Ok::<_, ZeroError>((model.num_params(), [losses[0], losses[3]]))
    });
    let peak = HEAP.peak_usage().saturating_sub(before);
    let (parameters, losses) = trained.expect("ranks end").swap_remove(0).expect("trained");
    let bytes = RANKS * parameters * FLOAT_BYTES;
    (peak as f64 / bytes as f64, losses)
}

#[test]
fn a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two() {
    // Large enough that the matrix kernels' scratch memory, a core's cache per thread, is a small part.
    let config = GptConfig::new(TIME, 6, 4, 192).with_vocabulary(VOCABULARY);
    let initial = config.init::<B>(&Default::default());
    let [zero, one, two] = Stage::ALL.map(|stage| train(&initial, stage));
    println!(
        "bytes a rank for each byte of its parameters: {} {} {}",
        zero.0, one.0, two.0
    );
    assert!(zero.0 > 3.9, "{}", zero.0);
    assert!(one.0 > LIMIT, "{}", one.0);
    assert!(two.0 < LIMIT, "{}", two.0);
    let [first, last] = two.1;
    assert!(last < first, "it learns: {first} {last}");
    assert_eq!(two.1, one.1);
    assert_eq!(two.1, zero.1);
}
