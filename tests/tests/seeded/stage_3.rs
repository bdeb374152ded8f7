//! Law: stage 3 over ranks has the bits of stage 2 together with autocast, scopes, offload,
//! budgets, accumulation, a loss scaler, clipping by the norm of all ranks, and frozen parameters.

use std::sync::{Arc, Mutex};

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, ModuleMapper, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::AdamWConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_accum::{AccumConfig, ClipByNorm};
use burn_amp::{Autocast, Bf16, F16, GradScaler, GradScalerConfig};
use burn_checkpoint::{MemoryBudget, Remat, apart};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, Memory, ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings,
};
use examples::gpt::model::{Gpt, GptConfig};
use examples::training::recompute::Checkpoint;
use tests::compare::bits;

type Ranks = Sharded<Autodiff<Remat<Flex>>>;

const RANKS: usize = 2;
const STEPS: usize = 6;
const TIME: usize = 8;
const VOCABULARY: usize = 16;

/// What is used with stage 3.
#[derive(Clone, Debug)]
struct Case {
    checkpoint: Checkpoint,
    budget: Option<MemoryBudget>,
    window: usize,
    scaler: GradScalerConfig,
    frozen: bool,
    shards: Memory,
}

impl Default for Case {
    fn default() -> Self {
        Self {
            checkpoint: Checkpoint::None,
            budget: None,
            window: 1,
            scaler: GradScalerConfig::disabled(),
            frozen: false,
            shards: Memory::Host,
        }
    }
}

/// Freezes every third parameter.
struct Freeze(usize);

impl<B: AutodiffBackend> ModuleMapper<B> for Freeze {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        match self.0 % 3 {
            0 => param.set_require_grad(false),
            _ => param,
        }
    }
}

fn loss<B: Backend>(model: &Gpt<B>, seed: usize) -> Tensor<B, 1> {
    let token = |index: usize| ((index * 7 + seed * 5 + index / 3) % VOCABULARY) as i32;
    let tokens = TensorData::new((0..2 * TIME).map(token).collect(), [2, TIME]);
    let tokens = Tensor::<B, 2, Int>::from_data(tokens, &Default::default());
    let logits = model.forward(tokens.clone()).flatten::<2>(0, 1);
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, tokens.flatten(0, 1))
}

/// The losses, the loss of the module for validation, the scale and the trained parameters of each
/// rank.
type Trained = (Vec<Vec<u32>>, Vec<u32>, f32, Vec<Vec<u32>>);

fn train<B: AutodiffBackend>(stage: Stage, case: &Case) -> Vec<Trained> {
    B::seed(&Default::default(), 42);
    let config = GptConfig::new(TIME, 2, 2, 16).with_vocabulary(VOCABULARY);
    let start = config.with_checkpoint(case.checkpoint);
    let start = Mutex::new(start.init::<B>(&Default::default()));
    let trained = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let rank = group.rank();
        let model = start.lock().expect("no holder panics").clone();
        let model = match case.frozen {
            true => model.map(&mut Freeze(0)),
            false => model,
        };
        let _apart = apart();
        let _budget = case.budget.map(MemoryBudget::install);
        let settings = ZeroSettings {
            bucket_elements: 500,
            shards: case.shards,
            ..ZeroSettings::stage(stage)
        };
        let scaler = GradScaler::new(&case.scaler).expect("valid");
        let mut update = Update::new(AdamWConfig::new().init())
            .clip_norm(0.5)?
            .reduce(settings, Arc::new(group))?
            .accumulate(AccumConfig::mean(case.window))?
            .scale(scaler.clone())?;
        let mut model = update.prepare(model)?;
        let mut losses = Vec::new();
        for step in 0..STEPS {
            let loss = loss(&model, step * RANKS + rank);
            losses.push(bits(loss.clone()));
            let gradients = update.backward(&model, loss);
            model = update.step(1e-2, model, gradients)?;
        }
        let valid = bits(self::loss(&model.valid(), 99));
        let parameters = super::parameters::parameters(&model);
        Ok::<_, UpdateError>((losses, valid, scaler.scale(), parameters))
    });
    let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
    trained.expect("ranks agree")
}

fn check<B: AutodiffBackend>(case: &Case) -> Vec<Trained> {
    let expected = train::<B>(Stage::Gradients, case);
    let found = train::<B>(Stage::Parameters, case);
    assert!(found == expected, "{case:?}");
    assert!(found[0].0 != found[1].0, "ranks have their own data");
    assert!(found[0].3 == found[1].3, "and the same parameters");
    found
}

/// Every way to hold activations, with and without accumulation and frozen parameters, with shards
/// in either memory.
fn cases() -> impl Iterator<Item = Case> {
    let half = MemoryBudget::fraction(0.5).expect("between 0 and 1");
    let held = [
        (Checkpoint::None, None),
        (Checkpoint::Block, None),
        (Checkpoint::KeepCompute, None),
        (Checkpoint::Offload, None),
        (Checkpoint::None, Some(half)),
    ];
    let held = held.into_iter().enumerate();
    held.map(|(number, (checkpoint, budget))| Case {
        checkpoint,
        budget,
        window: 1 + number % 2,
        frozen: number % 3 == 1,
        shards: match number {
            0..3 => Memory::Host,
            _ => Memory::Device,
        },
        ..Case::default()
    })
}

#[test]
fn f32_has_the_bits_of_stage_2() {
    let _turn = super::turn();
    cases().for_each(|case| drop(check::<Ranks>(&case)));
}

#[test]
fn bf16_has_the_bits_of_stage_2() {
    let _turn = super::turn();
    cases().for_each(|case| drop(check::<Autocast<Ranks, Bf16>>(&case)));
}

#[test]
fn f16_has_the_bits_of_stage_2_where_steps_are_skipped() {
    let _turn = super::turn();
    for case in cases() {
        let case = Case {
            scaler: GradScalerConfig {
                init_scale: 2f32.powi(30),
                backoff_factor: 2f64.powi(-12),
                ..GradScalerConfig::default()
            },
            ..case
        };
        let trained = check::<Autocast<Ranks, F16>>(&case);
        assert!(trained[0].2 < 2f32.powi(30), "a step was skipped: {case:?}");
        assert!(
            trained[0].0[0] != trained[0].0[STEPS - 1],
            "and others were not"
        );
    }
}
