//! The loss in chunks is Burn's over full logits: on every backend, on ranks of every stage, and in
//! a window by tokens.

use std::sync::Arc;

use burn::backend::Autodiff;
use burn::module::{AutodiffModule, Module, Param};
use burn::nn::loss::{CrossEntropyLossConfig, Reduction};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_accum::{AccumConfig, Counted};
use burn_amp::{Autocast, F16, Off};
use burn_checkpoint::{Remat, checkpoint};
use burn_fused::{Chunk, LinearCrossEntropy, LinearCrossEntropyLossConfig};
use burn_update::{Update, UpdateError};
use burn_zero::{
    GroupOptions, ProcessGroup, ReduceOverRanks, Sharded, Stage, ThreadGroup, ZeroSettings,
};
use tests::compare::{relative_error, values};

tests::on_every_backend!(
    gradients_are_those_of_full_logits,
    ranks_are_one_rank,
    a_window_by_tokens_is_the_union
);

const ROWS: usize = 24;
const WIDTH: usize = 10;
const CLASSES: usize = 37;
const STEPS: usize = 3;
const IGNORED: i64 = -100;
/// The tolerance for f32 sums in another order.
const ROUNDING: f32 = 1e-5;
/// The tolerance for f16 products.
const F16_ROUNDING: f32 = 5e-3;

/// The last part of a language model, whose output layer is its embedding.
#[derive(Module, Debug)]
struct Net<B: Backend> {
    embedding: Param<Tensor<B, 2>>,
    inner: Param<Tensor<B, 2>>,
    bias: Param<Tensor<B, 1>>,
}

/// Numbers between -0.5 and 0.5.
fn numbers<B: Backend, const D: usize>(shape: [usize; D], seed: usize) -> Tensor<B, D> {
    let number = |index: usize| ((index * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5;
    let numbers: Vec<_> = (0..shape.iter().product()).map(number).collect();
    Tensor::<B, 1>::from_floats(numbers.as_slice(), &Default::default()).reshape(shape)
}

/// Tokens `[ROWS]`, of which a third is ignored where `padded`: not as many in each half.
fn tokens<B: Backend>(step: usize, padded: bool) -> Tensor<B, 1, Int> {
    let token = |row: usize| match padded && row.is_multiple_of(3) && row < 15 {
        true => IGNORED,
        false => ((row * 17 + step * 5 + row / 4) % CLASSES) as i64,
    };
    let tokens: Vec<_> = (0..ROWS).map(token).collect();
    Tensor::from_data(tokens.as_slice(), &Default::default())
}

fn config() -> LinearCrossEntropyLossConfig {
    LinearCrossEntropyLossConfig::new()
        .with_chunk(Chunk::Rows(5))
        .with_ignore_index(Some(IGNORED))
}

impl<B: Backend> Net<B> {
    fn new() -> Self {
        Self {
            embedding: Param::from_tensor(numbers([CLASSES, WIDTH], 1).mul_scalar(2.0)),
            inner: Param::from_tensor(numbers([WIDTH, WIDTH], 2)),
            bias: Param::from_tensor(numbers([CLASSES], 3)),
        }
    }

    fn hidden(&self, step: usize) -> Tensor<B, 2> {
        let embedded = self.embedding.val().select(0, tokens(step, false));
        checkpoint(|| embedded.matmul(self.inner.val()).tanh() * 2.0)
    }

    /// The mean loss from full logits.
    fn full(&self, step: usize) -> Tensor<B, 1> {
        let logits = self.hidden(step).matmul(self.embedding.val().transpose());
        let logits = logits + self.bias.val().unsqueeze();
        let loss = CrossEntropyLossConfig::new().init(&logits.device());
        loss.forward(logits, tokens(step + 1, false))
    }

    /// The loss of a part of the rows, in chunks.
    fn chunked(
        &self,
        step: usize,
        [part, parts]: [usize; 2],
        padded: bool,
        config: &LinearCrossEntropyLossConfig,
    ) -> LinearCrossEntropy<B> {
        let rows = ROWS / parts;
        let hidden = self.hidden(step).narrow(0, part * rows, rows);
        let targets = tokens(step + 1, padded).narrow(0, part * rows, rows);
        let weight = self.embedding.val().transpose();
        let loss = config.init();
        loss.forward_counted(hidden, weight, Some(self.bias.val()), targets)
    }
}

type Weights = [Vec<f32>; 3];

fn distance(found: &Weights, expected: &Weights) -> f32 {
    let pairs = found.iter().zip(expected);
    pairs.fold(0.0, |most, (found, expected)| {
        relative_error(found, expected).max(most)
    })
}

fn weights<B: Backend>(model: &Net<B>) -> Weights {
    [
        values(model.embedding.val()),
        values(model.inner.val()),
        values(model.bias.val()),
    ]
}

fn gradients<B: AutodiffBackend>(loss: impl Fn(&Net<B>) -> Tensor<B, 1>) -> (f32, Weights) {
    let model = Net::<B>::new();
    let loss = loss(&model);
    let gradients = loss.backward();
    let of = |tensor: Tensor<B, 2>| values(tensor.grad(&gradients).expect("it is used"));
    let bias = model.bias.val().grad(&gradients).expect("it is used");
    let gradients = [
        of(model.embedding.val()),
        of(model.inner.val()),
        values(bias),
    ];
    (values(loss)[0], gradients)
}

fn gradients_are_those_of_full_logits<I: Backend>() {
    fn check<B: AutodiffBackend>(expected: &(f32, Weights), rounding: f32) {
        for scale in [1.0, 1024.0] {
            let scaled = |x: f32| x / scale as f32;
            let (loss, found) =
                gradients::<B>(|net| net.chunked(0, [0, 1], false, &config()).loss * scale);
            let found = found.map(|x| x.into_iter().map(scaled).collect());
            let apart = distance(&found, &expected.1).max((scaled(loss) / expected.0 - 1.0).abs());
            println!("{}, times {scale}: {apart}", B::name(&Default::default()));
            assert!(apart < rounding, "{apart}");
        }
    }
    let full = gradients::<Autodiff<I>>(|net| net.full(0));
    check::<Autodiff<I>>(&full, ROUNDING);
    check::<Autocast<Sharded<Autodiff<Remat<I>>>, Off>>(&full, ROUNDING);
    check::<Autocast<Sharded<Autodiff<Remat<I>>>, F16>>(&full, F16_ROUNDING);

    let net = Net::<I>::new();
    let valid = values(net.chunked(0, [0, 1], false, &config()).loss)[0];
    assert!((valid / full.0 - 1.0).abs() < ROUNDING);
}

fn train<B: AutodiffBackend, O>(
    mut optimizer: O,
    mut model: Net<B>,
    loss: impl Fn(&Net<B>, usize) -> Tensor<B, 1>,
) -> Weights
where
    Net<B>: AutodiffModule<B>,
    O: Optimizer<Net<B>, B>,
{
    for step in 0..STEPS {
        let gradients = GradientsParams::from_grads(loss(&model, step).backward(), &model);
        model = optimizer.step(0.01, model, gradients);
    }
    weights(&model)
}

fn ranks_are_one_rank<I: Backend>() {
    type Ranked<I> = Autocast<Sharded<Autodiff<Remat<I>>>, Off>;
    // The stage's own rounding is that of `sharded.rs`.
    const ROUNDING: f32 = 2e-5;
    let adam = || AdamWConfig::new().with_epsilon(1e-3);
    let alone = train(adam().init(), Net::<Autodiff<I>>::new(), |net, step| {
        net.full(step)
    });
    for stage in Stage::WITH_WHOLE_PARAMETERS {
        let settings = ZeroSettings {
            bucket_elements: 60,
            ..ZeroSettings::stage(stage)
        };
        let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            let rank = group.rank();
            let group: Arc<dyn ProcessGroup> = Arc::new(group);
            let mut update = Update::new(adam().init()).reduce(settings.clone(), group)?;
            let model = update.prepare(Net::<Ranked<I>>::new())?;
            let loss = |net: &Net<_>, step| net.chunked(step, [rank, 2], false, &config()).loss;
            Ok::<_, UpdateError>(train(update, model, loss))
        });
        for rank in trained.expect("both ranks end") {
            let apart = distance(&rank.expect("it trains"), &alone);
            println!("{stage}: {apart}");
            assert!(apart < ROUNDING, "{stage}: {apart}");
        }
    }
}

fn a_window_by_tokens_is_the_union<I: Backend>() {
    type B<I> = Autodiff<I>;
    let sum = config().with_reduction(Reduction::Sum);
    let adam = || AdamWConfig::new().with_epsilon(1e-3);
    let union = train(adam().init(), Net::<B<I>>::new(), |net, step| {
        net.chunked(step, [0, 1], true, &config()).loss
    });

    let mut update = Update::new(adam().init())
        .accumulate(AccumConfig::tokens(2))
        .expect("a window of two");
    let mut model = Net::<B<I>>::new();
    for step in 0..STEPS {
        for part in 0..2 {
            let LinearCrossEntropy { loss, items } = model.chunked(step, [part, 2], true, &sum);
            assert_eq!(values(items.clone()), [[8.0, 11.0][part]]);
            let gradients = update.backward(&model, Counted::sum(loss, items));
            model = update.step(0.01, model, gradients).expect("a step");
        }
    }
    let apart = distance(&weights(&model), &union);
    println!("window: {apart}");
    assert!(apart < ROUNDING, "{apart}");
}
