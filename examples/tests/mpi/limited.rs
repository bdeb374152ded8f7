//! Ranks that are processes with a limit of their own: the system gives none of them more memory.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_flex::Flex;
use burn_zero::{
    GroupOptions, ModelStates, MpiGroup, ProcessGroup, Sharded, Stage, ZeroConfig, ZeroError,
    ZeroOptimizer, estimate,
};
use examples::gpt::model::{Gpt, GptConfig};

use crate::launch::{self, Ended};

type B = Sharded<Autodiff<Flex>>;

const RANKS: usize = 4;
const TIME: usize = 4;
const VOCABULARY: usize = 32;
/// In the second the optimizer has its state from the first.
const STEPS: usize = 2;
const FLOAT_BYTES: u64 = 4;
const LONGEST: Duration = Duration::from_secs(240);

fn model() -> GptConfig {
    GptConfig::new(TIME, 14, 4, 192).with_vocabulary(VOCABULARY)
}

fn config(stage: Stage) -> ZeroConfig {
    ZeroConfig {
        stage,
        reduce_bucket_size: 100_000,
        ..ZeroConfig::default()
    }
}

/// Memory that the process may write to and shares with nobody: what `ulimit -d` limits.
fn data_bytes() -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let kibibytes =
        line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    1024 * kibibytes.expect("a number of kB")
}

/// The program of each process: trains in a stage, and prints what it had before there was a model, how many parameters that has, and
/// the losses.
pub fn rank(stage: &str) {
    let stage = Stage::try_from(stage.parse::<u8>().expect("a number")).expect("a stage");
    let trained = MpiGroup::run(GroupOptions::default(), |group| {
        train(Arc::new(group.clone()), stage)
    });
    trained.unwrap_or_else(|error: ZeroError| panic!("{error}"));
}

fn train(group: Arc<dyn ProcessGroup>, stage: Stage) -> Result<(), ZeroError> {
    let device = Default::default();
    B::seed(&device, 42);
    // What all of them have alike, threads and tables: once through a model of nothing much.
    loss(
        &GptConfig::new(TIME, 1, 1, 8)
            .with_vocabulary(VOCABULARY)
            .init::<B>(&device),
    )
    .backward();
    let before = data_bytes();
    let mut optimizer =
        ZeroOptimizer::new(AdamWConfig::new().init(), group, config(stage).sharding())?;
    let mut model = optimizer.prepare::<B, _>(model().init(&device))?;
    println!("before {before} {}", model.num_params());
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = loss(&model);
        losses.push(loss.clone().into_scalar().to_bits());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(1e-4, model, gradients);
    }
    println!("losses {losses:?}");
    Ok(())
}

fn loss(model: &Gpt<B>) -> Tensor<B, 1> {
    let device = Default::default();
    let tokens = Tensor::<B, 1, Int>::arange(0..TIME as i64 + 1, &device);
    let logits = model.forward(tokens.clone().narrow(0, 0, TIME).reshape([1, TIME]));
    let loss = CrossEntropyLossConfig::new().init(&device);
    loss.forward(
        logits.reshape([TIME, VOCABULARY]),
        tokens.narrow(0, 1, TIME),
    )
}

/// A job whose processes have a limit, in bytes, if there is one.
fn job(stage: Stage, limit: Option<u64>) -> Ended {
    // The allocator gives back what is freed, and has one arena for all threads: what is held is what is counted.
    let allocator =
        "export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536";
    let limit = limit.map_or(String::new(), |bytes| format!("ulimit -d {}", bytes / 1024));
    let program = format!("limited {}", stage.number());
    launch::run_after(RANKS, &program, &format!("{allocator}\n{limit}"), LONGEST)
}

pub fn a_gpt_trains_within_a_limit_only_at_stage_two() {
    let free = job(Stage::OptimizerState, None);
    free.must_succeed();
    let found = free.marked("before ");
    let found = found
        .iter()
        .map(|line| line.split_once(' ').expect("two numbers"));
    let found: Vec<(u64, u64)> = found
        .map(|(before, p)| (before.parse().unwrap(), p.parse().unwrap()))
        .collect();
    let before = found
        .iter()
        .map(|(before, _)| *before)
        .max()
        .expect("ranks");
    let parameters = found[0].1;

    let peak =
        |stage| estimate(&ModelStates::adam(parameters), &config(stage), RANKS).peak_device_bytes();
    let [zero, one, two] = Stage::ALL.map(peak);
    // In the middle between what stages 1 and 2 are expected to need.
    let limit = before + (one + two) / 2;
    let room = (one - two) / 2;
    assert!(
        room > parameters * FLOAT_BYTES / 5,
        "the stages differ: {zero} {one} {two}"
    );

    let sharded = job(Stage::Gradients, Some(limit));
    sharded.must_succeed();
    let losses = sharded.marked("losses ");
    assert_eq!(losses.len(), RANKS, "{}", sharded.output);
    assert_eq!(losses, free.marked("losses "), "the limit changes nothing");
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let refused = job(stage, Some(limit));
        refused.must_fail_with("memory allocation of", LONGEST);
        assert_eq!(
            refused.marked("before ").len(),
            RANKS,
            "the model itself fits: {}",
            refused.output
        );
        assert!(refused.marked("losses ").is_empty());
    }
    println!(
        "{parameters} parameters within {limit} bytes, {before} of them before there is a model; expected {zero} {one} {two}"
    );
}
