//! Law: how often the host reads, and how many kernels it launches, for each update. The table of
//! docs/mixed-precision.md.

use std::time::Duration;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Param};
use burn::nn::Linear;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn_accum::{AccumConfig, ClipByNorm, Counted};
use burn_amp::{Autocast, CastCache, GradScaler};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_update::Update;
use tests::compare::values;
use tests::queue::{Answers, Queue, answer_reads, reads_so_far, take_counts};

type B = Autocast<Autodiff<Queue<Flex>>>;
type Model<B> = Vec<Linear<B>>;

/// Parameters of the model.
pub const P: u64 = 6;

/// Different numbers of rows among them, of which one, that of the biases, is 1.
const R: u64 = 2;

/// Micro-batches of a window.
pub const W: u64 = 8;

/// Finding out on the device whether gradients are finite. For each parameter: a product, the sums
/// of its rows, their addition to those of parameters with as many rows. For each number of rows: a
/// sum, but for 1, and an addition, but for the first. Then the flag.
const VERDICT: u64 = 2 * P + (P - R) + (R - 1) + (R - 1) + 3;

fn model<B: Backend>() -> Vec<Linear<B>> {
    let layer = |_| Linear {
        weight: Param::from_tensor(Tensor::full([4, 4], 0.3, &Default::default())),
        bias: Some(Param::from_tensor(Tensor::full(
            [4],
            0.1,
            &Default::default(),
        ))),
    };
    (0..P / 2).map(layer).collect()
}

fn loss<B: Backend>(model: &Model<B>) -> Tensor<B, 1> {
    let x = Tensor::<B, 2>::ones([2, 4], &Default::default());
    model.iter().fold(x, |x, layer| layer.forward(x)).sum()
}

fn gradients<B: AutodiffBackend>(model: &Model<B>, tokens: bool) -> GradientsParams {
    let loss = loss(model);
    match tokens {
        true => Counted::sum(loss, 2).backward(model),
        false => GradientsParams::from_grads(loss.backward(), model),
    }
}

pub fn sgd<B: AutodiffBackend>() -> impl Optimizer<Model<B>, B> {
    SgdConfig::new().init()
}

/// What `launches` counts in the last of so many `updates` of so many micro-batches each, once with
/// `optimizer` and once with SGD alone.
pub fn with_and_without<B: AutodiffBackend, O: Optimizer<Model<B>, B>>(
    mut optimizer: O,
    (updates, micro_batches, tokens): (u64, u64, bool),
    mut launches: impl FnMut(&Model<B>) -> u64,
) -> (u64, u64) {
    let mut run = |step: &mut dyn FnMut(Model<B>, GradientsParams, bool) -> Model<B>| {
        let mut model = model();
        let mut last = 0;
        for _ in 0..updates {
            for micro_batch in 1..=micro_batches {
                let gradients = gradients(&model, tokens);
                model = step(model, gradients, micro_batch == micro_batches);
            }
            last = launches(&model);
        }
        last
    };
    let with = run(&mut |model, gradients, _| optimizer.step(0.1, model, gradients));
    drop(optimizer); // and the scaler, so that losses are not scaled
    let mut plain = sgd();
    let without = run(&mut |model, gradients, is_update| match is_update {
        true => plain.step(0.1, model, gradients),
        false => model,
    });
    (with, without)
}

/// The host's reads for an update of `micro_batches`, and the launches of the second one without
/// those of forward, backward and SGD.
fn of_update(update: Update<Model<B>, B>, micro_batches: u64, tokens: bool) -> (u64, u64) {
    take_counts();
    let before = reads_so_far();
    let (with, without) = with_and_without(update, (2, micro_batches, tokens), |_| {
        take_counts().launches
    });
    let reads = reads_so_far() - before;
    assert_eq!(reads % 2, 0);
    (reads / 2, with - without)
}

pub fn plain<B: AutodiffBackend>() -> Update<Model<B>, B> {
    Update::new(sgd())
}

pub fn clipped<B: AutodiffBackend>() -> Update<Model<B>, B> {
    plain().clip_norm(1.0).unwrap()
}

pub fn scaled<B: AutodiffBackend>() -> Update<Model<B>, B> {
    plain().scale(GradScaler::default()).unwrap()
}

/// Clipping, windows and a scale.
pub fn all_parts<B: AutodiffBackend>(config: AccumConfig) -> Update<Model<B>, B> {
    let windows = clipped().accumulate(config).unwrap();
    windows.scale(GradScaler::default()).unwrap()
}

#[test]
fn a_scale_launches_two_kernels_a_parameter_and_reads_once() {
    // The loss and its gradient; for each parameter: unscaling, the sum.
    assert_eq!(of_update(scaled(), 1, false), (1, 2 + 2 * P));
}

#[test]
fn a_window_reads_once() {
    for config in [
        AccumConfig::mean(W as usize),
        AccumConfig::tokens(W as usize),
    ] {
        let tokens = config == AccumConfig::tokens(W as usize);
        // For each parameter: the mask and the accumulation, but for the first. Then a sum and a
        // division.
        let launches = W * (VERDICT + 2 * P) - P + 2 * P;
        let windows = plain().accumulate(config).unwrap();
        let found = of_update(windows, W, tokens);
        assert_eq!(found, (1, launches));
    }
}

#[test]
fn clipping_reads_nothing() {
    // For each parameter: square, sum, root, product; the norm and the factor.
    let found = of_update(clipped(), 1, false);
    assert_eq!(found, (0, 4 * P + 8));
}

#[test]
fn all_together_read_once_an_update() {
    for config in [
        AccumConfig::mean(W as usize),
        AccumConfig::tokens(W as usize),
    ] {
        let tokens = config == AccumConfig::tokens(W as usize);
        // Those of a window and of clipping; the loss and its gradient, and unscaling; the next
        // scale, unless the host knows it.
        let window = W * (VERDICT + 2 * P) + P;
        let launches = window + 4 * P + 8 + W * (2 + P) + 3 + (W - 2) * 5;
        let found = of_update(all_parts(config), W, tokens);
        assert_eq!(found, (1, launches));
    }
}

/// A micro-batch within a window returns before its flag can be read, also on a backend whose reads
/// wait at their first poll: only the end of the window needs it.
#[test]
fn a_window_waits_for_no_read_before_its_end() {
    let scaler = GradScaler::default();
    let windows = plain().accumulate(AccumConfig::mean(W as usize)).unwrap();
    let mut update = windows.scale(scaler.clone()).unwrap();
    let mut model = model::<B>();
    answer_reads(Answers::Never);
    for micro_batch in 1..=W {
        if micro_batch == W {
            answer_reads(Answers::AtOnce);
        }
        let gradients = gradients(&model, false);
        model = update.step(0.1, model, gradients).unwrap();
    }
    assert_eq!((scaler.steps(), update.updates()), (W, 1));
}

/// When reads are answered makes no difference.
#[test]
fn late_answers_change_nothing() {
    let late = Duration::from_millis(20);
    let run = |window: Option<usize>, answers| {
        answer_reads(answers);
        let scaler = GradScaler::default();
        let update = match window {
            Some(window) => plain().accumulate(AccumConfig::mean(window)).unwrap(),
            None => plain(),
        };
        let mut update = update.scale(scaler.clone()).unwrap();
        let mut model = model::<B>();
        for step in 0..6 {
            let factor = if step % 2 == 1 { f32::INFINITY } else { 1.0 };
            let gradients = loss(&model).mul_scalar(factor).backward();
            let gradients = GradientsParams::from_grads(gradients, &model);
            model = update.step(0.1, model, gradients).unwrap();
        }
        let weights = model.iter().map(|layer| values(layer.weight.val()));
        let weights: Vec<_> = weights.collect();
        (weights, scaler.scale(), scaler.skipped_steps())
    };
    for window in [None, Some(1), Some(3)] {
        let expected = run(window, Answers::AtOnce);
        assert_eq!(expected.2, 3);
        for answers in [Answers::Later(late), Answers::LaterAndBlock(late)] {
            assert_eq!(run(window, answers), expected, "windows of {window:?}");
        }
    }
}

/// The gradients of a window's last micro-batch, each block in a scope, and the casts of the
/// window.
fn casts_of_window<I>(use_before: impl Fn(&[Linear<Autocast<Autodiff<I>>>])) -> (Vec<Vec<f32>>, u64)
where
    I: Backend,
{
    let layers = model::<Autocast<Autodiff<I>>>();
    use_before(&layers);
    take_counts();
    let mut last = Vec::new();
    for _ in 0..W {
        let x = Tensor::<Autocast<Autodiff<I>>, 2>::ones([2, 4], &Default::default());
        let forward = |x, layer: &Linear<_>| checkpoint(|| layer.forward(x));
        let loss = layers.iter().fold(x, forward).sum();
        let gradients = loss.backward();
        let weights = layers.iter().map(|layer| layer.weight.grad(&gradients));
        last = weights.flatten().collect();
    }
    let casts = take_counts().by_operation["float_cast"];
    (last.into_iter().map(values).collect(), casts)
}

/// As many casts of weights as `plain` has, without those that a cache saves.
fn saved_casts<I: Backend>(plain: &(Vec<Vec<f32>>, u64)) -> [u64; 2] {
    let (cached, casts) = casts_of_window::<I>(|_| {});
    assert_eq!(plain.0, cached);
    // The first use may be one without gradients.
    let (again, after_use) = casts_of_window::<I>(|layers| {
        for layer in layers {
            let x = Tensor::<Autocast<I>, 2>::ones([2, 4], &Default::default());
            values(layer.valid().forward(x));
        }
    });
    assert_eq!(plain.0, again);
    [plain.1 - casts, plain.1 - after_use]
}

#[test]
fn a_weight_is_cast_once_a_window() {
    let plain = casts_of_window::<Remat<Queue<Flex>>>(|_| {});
    // Each weight and bias in forward, the weights again in the replays.
    let of_weights = W * (P + P / 2);
    let below = saved_casts::<Remat<CastCache<Queue<Flex>>>>(&plain);
    assert_eq!(below, [of_weights - P, of_weights]);
    // A low copy made in a scope is dropped where it ends, and cast again.
    let above = saved_casts::<CastCache<Remat<Queue<Flex>>>>(&plain);
    assert_eq!(above, [52, 64]);
}
