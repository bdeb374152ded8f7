//! Repeats PyTorch's training of a small transformer from its weights and compares every loss and
//! every gradient norm, over updates of several micro-batches, clipped by the global norm, with
//! AdamW.
//!
//! A separate binary, because every f16 backward pass of a process without a scaler of its own
//! would use this one's.

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::nn::loss::CrossEntropyLossConfig;
use burn::nn::{
    Embedding, EmbeddingConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig,
};
use burn::optim::{AdamWConfig, GradientsParams};
use burn::tensor::activation::softmax;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor, TensorData};
use burn_accum::{AccumConfig, ClipNorm};
use burn_amp::{Autocast, Bf16, F16, GradScaler, GradScalerConfig, Off};
use burn_update::Update;
use serde::Deserialize;
use tests::compare::values;
use tests::is_vulkan;

#[derive(Deserialize)]
struct Golden {
    #[serde(rename = "V")]
    vocabulary: usize,
    #[serde(rename = "T")]
    positions: usize,
    #[serde(rename = "D")]
    width: usize,
    #[serde(rename = "H")]
    heads: usize,
    #[serde(rename = "B")]
    batch: usize,
    #[serde(rename = "A")]
    micro_batches: usize,
    params: Weights,
    /// Sequences of one token more than the model's positions, concatenated.
    data: Vec<i64>,
    f32: Run,
    bf16: Run,
    f16: Run,
}

#[derive(Deserialize)]
struct Run {
    losses: Vec<f32>,
    norms: Vec<f32>,
}

#[derive(Deserialize)]
struct Weights {
    emb: Vec<f32>,
    pos: Vec<f32>,
    head: LinearWeights,
    lnf: NormWeights,
    blocks: Vec<BlockWeights>,
}

#[derive(Deserialize)]
struct LinearWeights {
    w: Vec<f32>,
    b: Vec<f32>,
}

#[derive(Deserialize)]
struct NormWeights {
    g: Vec<f32>,
    b: Vec<f32>,
}

#[derive(Deserialize)]
struct BlockWeights {
    ln1: NormWeights,
    ln2: NormWeights,
    q: LinearWeights,
    k: LinearWeights,
    v: LinearWeights,
    o: LinearWeights,
    f1: LinearWeights,
    f2: LinearWeights,
}

#[derive(Module, Debug)]
struct Transformer<B: Backend> {
    embedding: Embedding<B>,
    positions: Param<Tensor<B, 2>>,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
    head: Linear<B>,
}

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm1: LayerNorm<B>,
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    output: Linear<B>,
    norm2: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    heads: usize,
}

fn param<B: Backend, const D: usize>(values: &[f32], shape: [usize; D]) -> Param<Tensor<B, D>> {
    let data = TensorData::new(values.to_vec(), shape);
    Param::from_tensor(Tensor::from_data(data, &B::Device::default()))
}

fn linear<B: Backend>(from: &LinearWeights) -> Linear<B> {
    let outputs = from.b.len();
    let inputs = from.w.len() / outputs;
    let mut linear = LinearConfig::new(inputs, outputs).init(&B::Device::default());
    linear.weight = param(&from.w, [inputs, outputs]);
    linear.bias = Some(param(&from.b, [outputs]));
    linear
}

fn norm<B: Backend>(from: &NormWeights) -> LayerNorm<B> {
    let width = from.g.len();
    let mut norm = LayerNormConfig::new(width).init(&B::Device::default());
    norm.gamma = param(&from.g, [width]);
    norm.beta = Some(param(&from.b, [width]));
    norm
}

impl<B: Backend> Transformer<B> {
    fn of(golden: &Golden) -> Self {
        let (weights, width) = (&golden.params, golden.width);
        let config = EmbeddingConfig::new(golden.vocabulary, width);
        let mut embedding: Embedding<B> = config.init(&B::Device::default());
        embedding.weight = param(&weights.emb, [golden.vocabulary, width]);
        let block = |from: &BlockWeights| Block {
            norm1: norm(&from.ln1),
            query: linear(&from.q),
            key: linear(&from.k),
            value: linear(&from.v),
            output: linear(&from.o),
            norm2: norm(&from.ln2),
            up: linear(&from.f1),
            down: linear(&from.f2),
            heads: golden.heads,
        };
        Self {
            embedding,
            positions: param(&weights.pos, [golden.positions, width]),
            blocks: weights.blocks.iter().map(block).collect(),
            norm: norm(&weights.lnf),
            head: linear(&weights.head),
        }
    }

    fn loss(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [batch, length] = tokens.dims();
        let positions = length - 1;
        let inputs = tokens.clone().slice([0..batch, 0..positions]);
        let targets = tokens.slice([0..batch, 1..length]);
        let mut x = self.embedding.forward(inputs) + self.positions.val().unsqueeze();
        for block in &self.blocks {
            x = block.forward(x);
        }
        let logits = self.head.forward(self.norm.forward(x));
        let [_, _, classes] = logits.dims();
        CrossEntropyLossConfig::new()
            .init(&logits.device())
            .forward(
                logits.reshape([batch * positions, classes]),
                targets.reshape([batch * positions]),
            )
    }
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let attended = self.attention(self.norm1.forward(x.clone()));
        let x = x + attended;
        let hidden = Gelu::new().forward(self.up.forward(self.norm2.forward(x.clone())));
        x + self.down.forward(hidden)
    }

    fn attention(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, length, width] = x.dims();
        let head = width / self.heads;
        let split = |x: Tensor<B, 3>| x.reshape([batch, length, self.heads, head]).swap_dims(1, 2);
        let query = split(self.query.forward(x.clone()));
        let key = split(self.key.forward(x.clone()));
        let value = split(self.value.forward(x.clone()));
        let scores = query.matmul(key.swap_dims(2, 3)) / (head as f64).sqrt();
        let future = Tensor::<B, 2>::ones([length, length], &x.device())
            .triu(1)
            .bool()
            .unsqueeze::<4>();
        let weights = softmax(
            scores.mask_fill(future.expand([batch, self.heads, length, length]), -1e4),
            3,
        );
        let mixed = weights.matmul(value).swap_dims(1, 2);
        self.output.forward(mixed.reshape([batch, length, width]))
    }
}

/// The largest relative differences of the losses and of the gradients' norms from PyTorch's.
fn differences<B: AutodiffBackend>(
    golden: &Golden,
    expected: &Run,
    scaler: Option<&GradScaler>,
) -> (f32, f32) {
    let mut model = Transformer::<B>::of(golden);
    let adamw = AdamWConfig::new()
        .with_beta_2(0.98)
        .with_epsilon(1e-8)
        .with_weight_decay(0.05);
    let clip = ClipNorm::new(1.0).unwrap();
    let norm = clip.norm();
    let windows = AccumConfig::mean(golden.micro_batches);
    let mut update = Update::new(adamw.init())
        .clip(clip)
        .unwrap()
        .accumulate(windows)
        .unwrap();
    if let Some(scaler) = scaler {
        update = update.scale(scaler.clone()).unwrap();
    }

    let relative = |found: f32, expected: f32| (found - expected).abs() / expected;
    let length = golden.positions + 1;
    let (mut of_losses, mut of_norms) = (0.0_f32, 0.0_f32);
    let micro_batches = golden.data.chunks(golden.batch * length);
    let updates = match is_vulkan::<B>() {
        true => 12,
        false => expected.norms.len(),
    };
    let micro_batches = micro_batches.take(updates * golden.micro_batches);
    for (step, (tokens, expected_loss)) in micro_batches.zip(&expected.losses).enumerate() {
        let tokens = TensorData::new(tokens.to_vec(), [golden.batch, length]);
        let loss = model.loss(Tensor::from_data(tokens, &B::Device::default()));
        of_losses = of_losses.max(relative(values(loss.clone())[0], *expected_loss));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = update.step(3e-3, model, gradients).unwrap();
        if (step + 1) % golden.micro_batches == 0 {
            let expected = expected.norms[step / golden.micro_batches];
            let found = norm.last().expect("an update");
            of_norms = of_norms.max(relative(found, expected));
        }
    }
    (of_losses, of_norms)
}

fn golden() -> Golden {
    let text = include_str!("../golden/transformer.json");
    serde_json::from_str(text).expect("the golden numbers")
}

fn assert_within(what: &str, found: (f32, f32), tolerance: (f32, f32)) {
    assert!(
        found.0 <= tolerance.0 && found.1 <= tolerance.1,
        "{what}: losses differ by {:e}, norms by {:e}",
        found.0,
        found.1
    );
}

fn f32<B: Backend>() {
    let golden = golden();
    let found = differences::<Autocast<Autodiff<B>, Off>>(&golden, &golden.f32, None);
    assert_within("f32", found, (1e-5, 1e-5));
}

/// To f32 rounding on Flex and LibTorch: CubeCL leaves GELU's derivative to Burn's fallback, which
/// is good to 8e-4 with or without this crate (see `golden`).
#[test]
fn f32_on_flex() {
    f32::<burn_flex::Flex>();
}

#[cfg(feature = "tch")]
#[test]
fn f32_on_libtorch() {
    f32::<tests::LibTorch>();
}

fn bf16<B: Backend>() {
    let device = B::Device::default();
    if !B::supports_dtype(&device, burn::tensor::DType::BF16) {
        return;
    }
    let golden = golden();
    let found = differences::<Autocast<Autodiff<B>, Bf16>>(&golden, &golden.bf16, None);
    assert_within("bf16", found, (4e-3, 2e-2));
}

fn f16<B: Backend>() {
    let golden = golden();
    let config = GradScalerConfig {
        init_scale: 1024.0,
        ..Default::default()
    };
    let scaler = GradScaler::new(&config).unwrap();
    let found = differences::<Autocast<Autodiff<B>, F16>>(&golden, &golden.f16, Some(&scaler));
    assert_eq!((scaler.scale(), scaler.skipped_steps()), (1024.0, 0));
    assert_within("f16", found, (5e-4, 3e-3));
}

tests::on_every_backend!(bf16, f16);
