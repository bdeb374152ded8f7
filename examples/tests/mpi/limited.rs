//! Ranks that are processes with a limit of their own: the system gives none of them more memory.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams};
use burn::prelude::*;
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, MpiGroup, ProcessGroup, ReduceOverRanks, Sharded, Stage, ZeroSettings,
};
use examples::gpt::model::{Gpt, GptConfig};

use crate::launch::{self, Ended};

type B = Sharded<Autodiff<Flex>>;

/// What a rank of the job that [`a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two`]
/// starts is called.
pub const PROGRAM: &str = "limited ";

const RANKS: usize = 6;
const TIME: usize = 4;
const VOCABULARY: usize = 32;
/// From the second on the optimizer has its state.
const STEPS: usize = 3;
const FLOAT_BYTES: usize = 4;
/// Of a job that trains.
const LONGEST: Duration = Duration::from_secs(240);
/// Of a job that does not: it ends when memory does.
const SOON: Duration = Duration::from_secs(100);

/// What a rank may have for its model, in bytes for each byte of its parameters.
///
/// With `N` ranks all hold the parameters, 1. Stage 0 holds gradients, 1, and the state, 2, and
/// comes to 4. Stage 1 comes to the most when it reduces, with gradients, 1, what is reduced of
/// them, `1 / N`, and the state, `2 / N`: 2.5. Stage 2 comes to the most when the optimizer makes
/// new pieces of old ones, with three parts of state and gradients, the old pieces and the new:
/// `1 + 5 / N`, 1.83. Found on one machine were 4.3, 2.6 and 1.9. This is between the last two.
const LIMIT: f64 = 2.2;

fn model() -> GptConfig {
    GptConfig::new(TIME, 14, 4, 192).with_vocabulary(VOCABULARY)
}

/// Memory that the process may write to and shares with nobody: what `ulimit -d` limits.
fn data_bytes() -> usize {
    let status = fs::read_to_string("/proc/self/status").expect("Linux has it");
    let line = status.lines().find_map(|line| line.strip_prefix("VmData:"));
    let number = line.and_then(|line| line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok());
    1024 * number.unwrap_or_else(|| panic!("no number of kB in {line:?}"))
}

/// The program of each process: trains in a stage, and prints what it had before there was a model,
/// how many parameters that has, and the losses.
pub fn rank(stage: &str) {
    let stage = Stage::try_from(stage.parse::<u8>().expect("a number")).expect("a stage");
    let trained = MpiGroup::run(GroupOptions::default(), |group| {
        train(Arc::new(group.clone()), stage)
    });
    trained.unwrap_or_else(|error: UpdateError| panic!("{error}"));
}

fn train(group: Arc<dyn ProcessGroup>, stage: Stage) -> Result<(), UpdateError> {
    let device = Default::default();
    B::seed(&device, 42);
    // What all of them have alike, threads and tables: once through a model of nothing much.
    let small = GptConfig::new(TIME, 1, 1, 8).with_vocabulary(VOCABULARY);
    loss(&small.init::<B>(&device)).backward();
    let before = data_bytes();

    let sharding = ZeroSettings {
        bucket_elements: 100_000,
        ..ZeroSettings::stage(stage)
    };
    let mut update = Update::new(AdamWConfig::new().init()).reduce(sharding, group)?;
    let mut model = update.prepare(model().init::<B>(&device))?;
    println!("before {before} {}", model.num_params());
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        let loss = loss(&model);
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = update.step(1e-4, model, gradients)?;
    }
    assert!(losses[STEPS - 1] < losses[0], "it learns: {losses:?}");
    println!(
        "losses {:?}",
        losses.iter().map(|loss| loss.to_bits()).collect::<Vec<_>>()
    );
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
fn job(stage: Stage, limit: Option<usize>) -> Ended {
    // The allocator gives back what is freed and has one arena for all threads: what is held is
    // what is counted.
    let counted = "export MALLOC_ARENA_MAX=1 MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536 RAYON_NUM_THREADS=1";
    let limit = limit.map_or(String::new(), |bytes| format!("ulimit -d {}", bytes / 1024));
    let program = format!("{PROGRAM}{}", stage.number());
    launch::run_after(RANKS, &program, &format!("{counted}\n{limit}"), LONGEST)
}

/// What the ranks of a job had before there was a model, at most, and how many bytes of parameters
/// that has.
fn base(job: &Ended) -> (usize, usize) {
    let found = job.marked("before ");
    let numbers = found.iter().map(|line| {
        let (before, parameters) = line.split_once(' ').expect("two numbers");
        let number = |text: &str| text.parse::<usize>().expect("a number");
        (number(before), number(parameters) * FLOAT_BYTES)
    });
    numbers.max().expect("ranks have printed it")
}

pub fn a_gpt_trains_within_a_limit_that_it_exceeds_without_stage_two() {
    let free = job(Stage::DataParallel, None);
    free.must_succeed();
    let (base, parameters) = base(&free);
    let limit = base + (LIMIT * parameters as f64) as usize;
    println!(
        "{parameters} bytes of parameters within {limit}, {base} of them before there is a model"
    );

    let sharded = job(Stage::Gradients, Some(limit));
    sharded.must_succeed();
    let losses = sharded.marked("losses ");
    assert_eq!(losses.len(), RANKS, "{}", sharded.output);
    assert_eq!(losses, free.marked("losses "), "the limit changes nothing");
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let refused = job(stage, Some(limit));
        refused.must_fail_with("memory allocation of", SOON);
        let started = refused.marked("before ").len();
        assert_eq!(started, RANKS, "the model itself fits: {}", refused.output);
        assert!(refused.marked("losses ").is_empty());
    }
}
