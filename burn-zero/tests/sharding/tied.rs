//! A parameter that the module holds at two paths is one parameter: its gradient is the sum over
//! both, it is sharded once, and it stays one.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, ModuleMapper, Param};
use burn::nn::attention::generate_autoregressive_mask;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, Bf16};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{OffloadConfig, Recorder, Stage, Training, ZeroSettings};

use super::support::*;

const STEPS: usize = 4;
const RATE: f64 = 0.01;
const VOCABULARY: usize = 11;
const WIDTH: usize = 6;
const TIME: usize = 5;

/// A GPT whose output layer is its embedding.
#[derive(Module, Debug)]
struct Gpt<B: Backend> {
    tokens: Embedding<B>,
    blocks: TransformerEncoder<B>,
    /// `tokens.weight`, held again; else it is only used again.
    output: Option<Param<Tensor<B, 2>>>,
}

impl<B: Backend> Gpt<B> {
    /// The weight is at two paths.
    fn tied() -> Self {
        let gpt = Self::reused();
        Self {
            output: Some(gpt.tokens.weight.clone()),
            ..gpt
        }
    }

    /// The same model as one that Burn trains rightly: the weight is at one path, and used twice.
    fn reused() -> Self {
        let device = Default::default();
        let blocks = TransformerEncoderConfig::new(WIDTH, 8, 2, 1).with_dropout(0.0);
        let gpt = Self {
            tokens: EmbeddingConfig::new(VOCABULARY, WIDTH).init(&device),
            blocks: blocks.with_norm_first(true).init(&device),
            output: None,
        };
        gpt.map(&mut Fill(0))
    }

    /// The mean over all tokens.
    fn loss(&self, text: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let ([batch, _], device) = (text.dims(), text.device());
        let causal = generate_autoregressive_mask(batch, TIME, &device);
        let inputs = text.clone().slice([0..batch, 0..TIME]);
        let targets = text.slice([0..batch, 1..TIME + 1]).reshape([batch * TIME]);
        let stream = TransformerEncoderInput::new(self.tokens.forward(inputs)).mask_attn(causal);
        let stream = self.blocks.forward(stream).reshape([batch * TIME, WIDTH]);
        let output = self.output.as_ref().unwrap_or(&self.tokens.weight);
        let logits = stream.matmul(output.val().transpose());
        let cross_entropy = CrossEntropyLossConfig::new().init(&device);
        cross_entropy.forward(logits, targets)
    }
}

/// Weights that are the same in every process and thread.
struct Fill(usize);

impl<B: Backend> ModuleMapper<B> for Fill {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        self.0 += 1;
        let seed = self.0;
        param.map(|tensor| {
            let shape = tensor.shape();
            let values = TensorData::new(values(shape.num_elements(), seed), shape);
            Tensor::from_data(values, &tensor.device()).require_grad()
        })
    }
}

/// The sequences of `rank`.
fn text<B: Backend>(step: usize, rank: usize, world_size: usize) -> Tensor<B, 2, Int> {
    let tokens = values(ROWS * (TIME + 1), 200 + step).into_iter();
    let tokens: Vec<i32> = tokens
        .map(|value| ((value + 0.5) * VOCABULARY as f32) as i32)
        .collect();
    let all = Tensor::<B, 1, Int>::from_data(tokens.as_slice(), &Default::default());
    let rows = ROWS / world_size;
    all.reshape([ROWS, TIME + 1]).narrow(0, rank * rows, rows)
}

/// The weights, of which the one that is held twice must be the same at both paths.
fn weights<B: Backend>(gpt: &Gpt<B>) -> Vec<Vec<f32>> {
    let mut weights = parameters(gpt);
    if gpt.output.is_some() {
        assert_eq!(weights.pop().as_ref(), weights.first());
    }
    weights
}

fn step<B, O>(optimizer: &mut O, gpt: Gpt<B>, text: Tensor<B, 2, Int>) -> Gpt<B>
where
    B: AutodiffBackend,
    O: Optimizer<Gpt<B>, B>,
{
    let gradients = GradientsParams::from_grads(gpt.loss(text).backward(), &gpt);
    optimizer.step(RATE, gpt, gradients)
}

fn plain() -> Vec<Vec<f32>> {
    let mut optimizer = AdamWConfig::new().init();
    let train = |gpt, at| step(&mut optimizer, gpt, text(at, 0, 1));
    weights(&(0..STEPS).fold(Gpt::<Plain>::reused(), train))
}

fn sharded<B: AutodiffBackend>(world_size: usize, sharding: &ZeroSettings) -> Vec<Vec<f32>> {
    on_ranks(world_size, |group| {
        let rank = group.rank();
        let mut update = over_ranks(AdamWConfig::new().init(), group, sharding.clone())?;
        let gpt = update.prepare(Gpt::<B>::tied())?;
        let train = |gpt, at| step(&mut update, gpt, text(at, rank, world_size));
        Ok(weights(&(0..STEPS).fold(gpt, train)))
    })
}

#[test]
fn ranks_are_one_rank_on_all_data() {
    let plain = plain();
    for world_size in 1..=4 {
        for stage in WITH_PARAMETERS {
            let sharded = sharded::<B>(world_size, &small_buckets(stage));
            let distance = distance(&plain, &sharded);
            assert!(distance < 2e-5, "{world_size} ranks, {stage:?}: {distance}");
            if world_size == 1 {
                assert_eq!(plain, sharded, "{stage:?}");
            }
        }
    }
}

#[test]
fn stages_and_buckets_are_one_another_bit_for_bit() {
    for world_size in 2..=4 {
        let zero = sharded::<B>(world_size, &ZeroSettings::stage(Stage::DataParallel));
        let low =
            sharded::<Autocast<B, Bf16>>(world_size, &ZeroSettings::stage(Stage::DataParallel));
        assert_ne!(zero, low);
        for stage in WITH_PARAMETERS {
            for bucket_elements in [7, 1_000_000] {
                let sharding = ZeroSettings {
                    bucket_elements,
                    ..ZeroSettings::stage(stage)
                };
                let told = format!("{world_size} ranks, {stage:?}, {bucket_elements}");
                assert_eq!(zero, sharded::<B>(world_size, &sharding), "{told}");
                let autocast = sharded::<Autocast<B, Bf16>>(world_size, &sharding);
                assert_eq!(low, autocast, "{told}");
            }
        }
    }
}

/// Stages 0 and 1 need no `Sharded`.
#[test]
fn the_backend_may_be_burns() {
    let plain = plain();
    for stage in [Stage::DataParallel, Stage::OptimizerState] {
        let sharded = sharded::<Plain>(3, &small_buckets(stage));
        assert!(distance(&plain, &sharded) < 2e-5, "{stage:?}");
    }
}

#[test]
fn windows_of_micro_batches_are_one_another_bit_for_bit() {
    let train = |stage| {
        on_ranks(2, |group| {
            let rank = group.rank();
            let adam = AdamWConfig::new().init();
            let update = over_ranks(adam, group, small_buckets(stage))?;
            let mut update = update.accumulate(AccumConfig::mean(2))?;
            let gpt = update.prepare(Gpt::<B>::tied())?;
            // Micro-batches of half the rows: both together are those of a step.
            let micro = |gpt, at: usize| {
                let [rank, of] = [rank * 2 + at % 2, 4];
                step(&mut update, gpt, text(at / 2, rank, of))
            };
            Ok(weights(&(0..2 * STEPS).fold(gpt, micro)))
        })
    };
    let zero = train(Stage::DataParallel);
    assert!(distance(&plain(), &zero) < 2e-5);
    // Stage 2 reduces each micro-batch, the others the window.
    assert_eq!(zero, train(Stage::OptimizerState));
    assert!(distance(&zero, &train(Stage::Gradients)) < 2e-5);
}

type Run = Training<Gpt<B>, Update<Gpt<B>, B>, f64>;

fn build(
    group: std::sync::Arc<dyn burn_zero::ProcessGroup>,
    stage: Stage,
) -> Result<(Run, Recorder), UpdateError> {
    let adam = AdamWConfig::new().init();
    let (mut update, reduction) = reduced(adam, group, small_buckets(stage))?;
    let model = update.prepare(Gpt::<B>::tied())?;
    let recorder = reduction.recorder()?;
    let training = Training {
        model,
        optimizer: update,
        scheduler: RATE,
    };
    Ok((training, recorder))
}

/// The model's record has it at both paths, as Burn's has; the optimizer's state is there once.
#[test]
fn records_know_it_and_are_loaded() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [first, second, third] = dirs.each_ref().map(tempfile::TempDir::path);
    let whole = on_ranks(3, |group| {
        let (mut run, recorder) = build(group.clone(), Stage::Gradients)?;
        for at in 0..STEPS {
            if at == 2 {
                let state = TrainingState::at_step(2);
                let saved = recorder.save::<B, _, _, _>(first, run.by_ref(), state, Keep::All);
                saved.unwrap();
            }
            let text = text(at, group.rank(), 3);
            run.model = step(&mut run.optimizer, run.model, text);
        }
        Ok(weights(&run.model))
    });

    let (tensors, _) = contents(first);
    let names: BTreeSet<_> = tensors.keys().map(String::as_str).collect();
    assert_eq!(tensors["model/tokens.weight"], tensors["model/output"]);
    let states = |path: &str| names.iter().filter(|name| name.contains(path)).count();
    assert_eq!(states("optimizer/tokens.weight"), 2, "{names:?}"); // two moments
    assert_eq!(states("optimizer/output"), 0, "{names:?}");

    for (ranks, stage, from, to) in [
        (2, Stage::OptimizerState, first, second),
        (3, Stage::Gradients, second, third),
    ] {
        on_ranks(ranks, |group| {
            let (run, recorder) = build(group, stage)?;
            let (run, state) = recorder.load::<B, _, _, _>(from, None, run).unwrap();
            weights(&run.model);
            let saved = recorder.save::<B, _, _, _>(to, run.by_ref(), state.unwrap(), Keep::All);
            saved.unwrap();
            Ok(())
        });
        assert!(contents(to) == contents(first), "{ranks} ranks");
    }

    let resumed = on_ranks(3, |group| {
        let (run, recorder) = build(group.clone(), Stage::Gradients)?;
        let (mut run, _) = recorder.load::<B, _, _, _>(third, None, run).unwrap();
        for at in 2..STEPS {
            let text = text(at, group.rank(), 3);
            run.model = step(&mut run.optimizer, run.model, text);
        }
        Ok(weights(&run.model))
    });
    assert_eq!(resumed, whole);
}

/// Nothing has gathered the parameters since the step.
#[test]
fn shards_of_it_are_saved_at_both_paths() {
    let dir = tempfile::tempdir().unwrap();
    on_ranks(2, |group| {
        let (mut run, recorder) = build(group.clone(), Stage::Parameters)?;
        let text = text(0, group.rank(), 2);
        run.model = step(&mut run.optimizer, run.model, text);
        let state = TrainingState::at_step(1);
        let saved = recorder.save::<B, _, _, _>(dir.path(), run.by_ref(), state, Keep::All);
        saved.unwrap();
        Ok(())
    });
    let (tensors, _) = contents(dir.path());
    assert_eq!(tensors["model/tokens.weight"], tensors["model/output"]);
}

/// Burn makes a leaf of each path when it loads a record; then it is said what to do, and that
/// helps.
#[test]
fn a_model_that_was_taken_apart_is_prepared_again() {
    for stage in WITH_PARAMETERS {
        let loaded = on_ranks(2, |group| {
            let rank = group.rank();
            let adam = AdamWConfig::new().init();
            let mut update = over_ranks(adam, group, small_buckets(stage))?;
            let gpt = update.prepare(Gpt::<B>::tied())?;
            let apart = gpt.clone().map(&mut Fill(0));
            let told = catch_unwind(AssertUnwindSafe(|| {
                step(&mut update.clone(), apart.clone(), text(0, rank, 2))
            }));
            let told = *told.unwrap_err().downcast::<String>().unwrap();
            assert!(
                told.contains("output is tokens.weight held again"),
                "{told}"
            );

            let again = update.prepare(apart)?;
            let train = |gpt, at| step(&mut update, gpt, text(at, rank, 2));
            Ok(weights(&(0..STEPS).fold(again, train)))
        });
        assert_eq!(loaded, sharded::<B>(2, &small_buckets(stage)), "{stage:?}");
    }
}

/// What the others are compared with is trained at all, and Burn's own optimizer takes the two
/// apart.
#[test]
fn burn_leaves_the_second_path_behind() {
    let start = weights(&Gpt::<Flex>::reused());
    assert!(distance(&start, &plain()) > 1e-3);
    let mut optimizer = AdamWConfig::new().init();
    let gpt = step(&mut optimizer, Gpt::<Plain>::tied(), text(0, 0, 1));
    assert_ne!(
        gpt.tokens.weight.val().into_data(),
        gpt.output.unwrap().val().into_data()
    );
}

/// A layer and two clones of it with other weights, which are not trained: one before it, and one
/// behind.
#[derive(Module, Debug)]
struct Distilled<B: Backend> {
    before: Linear<B>,
    student: Linear<B>,
    behind: Linear<B>,
}

impl<B: Backend> Distilled<B> {
    fn new(same_ids: bool) -> Self {
        let device = Default::default();
        let linear = || LinearConfig::new(7, 3).with_bias(false).init(&device);
        let mut model = Self {
            before: linear().no_grad(),
            student: linear(),
            behind: linear().no_grad(),
        };
        if same_ids {
            let id = model.student.weight.id;
            model.before.weight.id = id;
            model.behind.weight.id = id;
        }
        let mut fill = Fill(0);
        model.before = model.before.map(&mut fill).no_grad();
        model.student = model.student.map(&mut fill);
        model.behind = model.behind.map(&mut fill).no_grad();
        model
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let teachers = self.before.forward(x.clone()) * self.behind.forward(x.clone());
        (self.student.forward(x) - teachers).square().mean()
    }
}

#[test]
fn frozen_clones_stay_what_they_are() {
    let mut optimizer = AdamWConfig::new().init();
    let mut model = Distilled::<Plain>::new(false);
    let start = parameters(&model);
    for at in 0..STEPS {
        let gradients = model.loss(batch(at, 0, 1)).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(RATE, model, gradients);
    }
    let plain = parameters(&model);
    assert!(plain[0] == start[0] && plain[1] != start[1] && plain[2] == start[2]);
    for world_size in 1..=3 {
        for stage in WITH_PARAMETERS {
            let sharded = on_ranks(world_size, |group| {
                let rank = group.rank();
                let adam = AdamWConfig::new().init();
                let mut update = over_ranks(adam, group, small_buckets(stage))?;
                let mut model = update.prepare(Distilled::<B>::new(true))?;
                for at in 0..STEPS {
                    let gradients = model.loss(batch(at, rank, world_size)).backward();
                    let gradients = GradientsParams::from_grads(gradients, &model);
                    model = update.step(RATE, model, gradients)?;
                }
                Ok(parameters(&model))
            });
            assert!(
                sharded[0] == plain[0] && sharded[2] == plain[2],
                "{stage:?}"
            );
            assert!(distance(&plain, &sharded) < 2e-5, "{world_size} {stage:?}");
        }
    }
}

#[test]
fn so_they_do_with_an_optimizer_on_the_host_alone() {
    let mut optimizer = OffloadConfig::default().init().unwrap();
    let mut model = Distilled::<Plain>::new(true);
    let start = parameters(&model);
    for at in 0..STEPS {
        let gradients = GradientsParams::from_grads(model.loss(batch(at, 0, 1)).backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    let end = parameters(&model);
    assert!(end[0] == start[0] && end[1] != start[1] && end[2] == start[2]);
}
