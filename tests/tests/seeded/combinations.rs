//! Law: all sixteen on/off combinations of mixed precision, accumulation, recomputation and
//! sharding train the same small GPT to the same loss; where the arithmetic is the same, bit for
//! bit.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_accum::AccumConfig;
use burn_amp::{Autocast, Bf16};
use burn_checkpoint::{Remat, RematStats};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings,
};
use examples::gpt::model::{Gpt, GptConfig};
use examples::training::recompute::Checkpoint;
use tests::compare::values;

/// The tolerance for losses that differ in the order of f32 sums, relative to the first loss.
const F32_ROUNDING: f32 = 1e-5;
/// The tolerance between losses of bf16 and of f32.
const BF16_ROUNDING: f32 = 5e-3;

const UPDATES: usize = 12;
const LEARNING_RATE: f64 = 1e-2;
/// Rows of an update, over all ranks and micro-batches.
const BATCH: usize = 8;
const TIME: usize = 12;
const VOCABULARY: usize = 32;
const RANKS: usize = 2;
const WINDOW: usize = 2;

/// Which features are on.
#[derive(Clone, Copy)]
struct On {
    accumulation: bool,
    recomputation: bool,
    sharding: Option<Stage>,
}

/// The mean loss of every update, and the parameters in the end.
#[derive(Debug, PartialEq)]
struct Trained {
    losses: Vec<f32>,
    parameters: Vec<Vec<f32>>,
}

fn config(recompute: bool) -> GptConfig {
    GptConfig::new(TIME, 2, 2, 16)
        .with_vocabulary(VOCABULARY)
        .with_checkpoint(match recompute {
            true => Checkpoint::Block,
            false => Checkpoint::None,
        })
}

/// Tokens `[rows, TIME + 1]` that follow each other by rules; four batches, over and over.
fn batch<B: Backend>(update: usize, rows: core::ops::Range<usize>) -> Tensor<B, 2, Int> {
    let tokens = rows.clone().flat_map(|row| {
        (0..=TIME)
            .map(move |t| ((row * 7 + t * (3 + row % 3) + update % 4 * 5) % VOCABULARY) as i32)
    });
    let data = TensorData::new(tokens.collect(), [rows.len(), TIME + 1]);
    Tensor::from_data(data, &Default::default())
}

fn loss<B: Backend>(model: &Gpt<B>, tokens: Tensor<B, 2, Int>) -> Tensor<B, 1> {
    let [rows, _] = tokens.dims();
    let inputs = tokens.clone().slice([0..rows, 0..TIME]);
    let targets = tokens.slice([0..rows, 1..TIME + 1]);
    let logits = model.forward(inputs).reshape([rows * TIME, VOCABULARY]);
    let loss = CrossEntropyLossConfig::new().init(&logits.device());
    loss.forward(logits, targets.reshape([rows * TIME]))
}

fn train<B: AutodiffBackend, O: Optimizer<Gpt<B>, B>>(
    mut model: Gpt<B>,
    mut optimizer: O,
    on: On,
    rank: usize,
    ranks: usize,
) -> Trained {
    let micro_batches = if on.accumulation { WINDOW } else { 1 };
    let rows = BATCH / ranks / micro_batches;
    let mut losses = Vec::new();
    for update in 0..UPDATES {
        let mut sum = 0.0;
        for micro_batch in 0..micro_batches {
            let first = (rank * micro_batches + micro_batch) * rows;
            let loss = loss(&model, batch(update, first..first + rows));
            sum += values(loss.clone())[0];
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(LEARNING_RATE, model, gradients);
        }
        losses.push(sum / micro_batches as f32);
    }
    Trained {
        losses,
        parameters: all(&model).into_iter().map(to_vec).collect(),
    }
}

/// Trains on the backend `B` from the weights `initial`.
fn run<B: AutodiffBackend>(initial: &[TensorData], on: On) -> Trained {
    let model = || {
        with_weights(
            config(on.recomputation).init::<B>(&Default::default()),
            initial,
        )
    };
    let adam = AdamWConfig::new();
    let Some(stage) = on.sharding else {
        return match on.accumulation {
            true => {
                let windows = Update::new(adam.init()).accumulate(AccumConfig::mean(WINDOW));
                train(model(), windows.expect("a window of two"), on, 0, 1)
            }
            false => train(model(), adam.init(), on, 0, 1),
        };
    };
    let trained = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let rank = group.rank();
        let sharding = ZeroSettings {
            bucket_elements: 1000,
            ..ZeroSettings::stage(stage)
        };
        let mut update = Update::new(adam.init()).reduce(sharding, Arc::new(group))?;
        if on.accumulation {
            update = update.accumulate(AccumConfig::mean(WINDOW))?;
        }
        let model = update.prepare(model())?;
        Ok::<_, UpdateError>(train(model, update, on, rank, RANKS))
    });
    let trained: Result<Vec<_>, _> = trained.expect("ranks end").into_iter().collect();
    let mut trained = trained.expect("ranks agree");
    let mut first = trained.swap_remove(0);
    for other in trained {
        assert_eq!(first.parameters, other.parameters, "ranks differ");
        for (loss, theirs) in first.losses.iter_mut().zip(other.losses) {
            *loss += theirs;
        }
    }
    first
        .losses
        .iter_mut()
        .for_each(|loss| *loss /= RANKS as f32);
    first
}

type Plain<I> = Autodiff<I>;
type Managed<I> = Autodiff<Remat<I>>;

fn on_its_backend<I: Backend>(initial: &[TensorData], mixed: bool, on: On) -> Trained {
    RematStats::reset_thread();
    match (mixed, on.recomputation, on.sharding.is_some()) {
        (false, false, false) => run::<Plain<I>>(initial, on),
        (false, true, false) => run::<Managed<I>>(initial, on),
        (false, false, true) => run::<Sharded<Plain<I>>>(initial, on),
        (false, true, true) => run::<Sharded<Managed<I>>>(initial, on),
        (true, false, false) => run::<Autocast<Plain<I>, Bf16>>(initial, on),
        (true, true, false) => run::<Autocast<Managed<I>, Bf16>>(initial, on),
        (true, false, true) => run::<Autocast<Sharded<Plain<I>>, Bf16>>(initial, on),
        (true, true, true) => run::<Autocast<Sharded<Managed<I>>, Bf16>>(initial, on),
    }
}

/// On the CPU: the smallest steps of software Vulkan are too many.
#[test]
fn sixteen_combinations_reach_the_same_loss_on_flex() {
    sixteen_combinations_reach_the_same_loss::<Flex>();
}

#[cfg(feature = "tch")]
#[test]
fn sixteen_combinations_reach_the_same_loss_on_libtorch() {
    sixteen_combinations_reach_the_same_loss::<tests::LibTorch>();
}

fn sixteen_combinations_reach_the_same_loss<I: Backend>() {
    let _turn = super::turn();
    I::seed(&Default::default(), 42);
    let initial = all(&config(false).init::<I>(&Default::default()));
    let run = |mixed, on| on_its_backend::<I>(&initial, mixed, on);
    let off = On {
        accumulation: false,
        recomputation: false,
        sharding: None,
    };
    let expected = run(false, off).losses;
    assert!(
        expected[UPDATES - 1] < 0.9 * expected[0],
        "it learns: {expected:?}"
    );
    for mixed in [false, true] {
        let tolerance = if mixed { BF16_ROUNDING } else { F32_ROUNDING };
        for accumulation in [false, true] {
            for sharding in [None, Some(Stage::Gradients)] {
                let on = On {
                    accumulation,
                    recomputation: false,
                    sharding,
                };
                let kept = run(mixed, on);
                let pairs = kept.losses.iter().zip(&expected);
                let distance = pairs.fold(0f32, |d, (a, b)| d.max((a - b).abs())) / expected[0];
                println!("mixed {mixed}, accumulation {accumulation}, {sharding:?}: {distance:e}");
                assert!(
                    distance < tolerance && (mixed == (distance > F32_ROUNDING)),
                    "mixed {mixed}, accumulation {accumulation}, {sharding:?}: {distance}"
                );
                let recomputed = run(
                    mixed,
                    On {
                        recomputation: true,
                        ..on
                    },
                );
                if sharding.is_none() {
                    assert!(RematStats::of_thread().replayed_operations > 0);
                }
                assert!(
                    kept == recomputed,
                    "recomputation changes bits: mixed {mixed}, accumulation {accumulation}, {sharding:?}"
                );
            }
            // With accumulation stage 2 rounds differently: a sum of means is not a mean of sums.
            let exact = match accumulation {
                true => &Stage::WITH_WHOLE_PARAMETERS[..2],
                false => &Stage::WITH_WHOLE_PARAMETERS[..],
            };
            let staged = exact.iter().map(|&stage| {
                let on = On {
                    accumulation,
                    recomputation: false,
                    sharding: Some(stage),
                };
                run(mixed, on)
            });
            let staged: Vec<_> = staged.collect();
            for (stage, other) in exact.iter().zip(&staged) {
                assert!(
                    *other == staged[0],
                    "{stage} changes bits: mixed {mixed}, accumulation {accumulation}"
                );
            }
        }
    }
}

fn to_vec(data: TensorData) -> Vec<f32> {
    data.to_vec().expect("parameters are f32")
}

/// The parameters, in the order of the module.
fn all<B: Backend, M: Module<B>>(module: &M) -> Vec<TensorData> {
    struct Collect(Vec<TensorData>);
    impl<B: Backend> ModuleVisitor<B> for Collect {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().into_data());
        }
    }
    let mut collect = Collect(Vec::new());
    module.visit(&mut collect);
    collect.0
}

/// The module with these parameters.
fn with_weights<B: AutodiffBackend, M: Module<B>>(module: M, weights: &[TensorData]) -> M {
    struct Set<'a>(core::slice::Iter<'a, TensorData>);
    impl<B: AutodiffBackend> ModuleMapper<B> for Set<'_> {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
            let data = self.0.next().expect("as many as the module has").clone();
            param.map(|tensor| Tensor::from_data(data, &tensor.device()).require_grad())
        }
    }
    module.map(&mut Set(weights.iter()))
}
