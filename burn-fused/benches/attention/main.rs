//! Time and memory of attention with its backward pass by the length of the sequence, alone and in
//! a step of a transformer: in blocks of queries, with all scores at once, and composed.
//!
//!     cargo bench --workspace --bench attention [-- --tokens 128,256,512,1024,2048 --rounds 7 --layers 0,1,4]
//!
//! On burn-flex, f32, random numbers. In every round each setting takes one step, so what disturbs
//! the machine disturbs all of them alike; ratios are taken within a round. Peak bytes are the
//! heap's above what was there before the step: query, key and value, or parameters and input, are
//! not counted, gradients are. One CSV line for each size and setting; with 0 layers it is
//! attention alone. `torch_attention.py` beside this file is attention alone in PyTorch.

mod whole;

use std::time::Instant;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::{gelu, softmax};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Distribution, ElementConversion, Tensor, module};
use burn_flex::Flex;
use burn_fused::FusedBackward;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type Plain = Autodiff<Flex>;
type Fused = FusedBackward<Plain>;
type Balanced = FusedBackward<Autodiff<Flex, BalancedCheckpointing>>;

/// Of query, key and value `[batch, heads, tokens, width]`, causal or not.
type Attention<B> = fn([Tensor<B, 4>; 3], bool) -> Tensor<B, 4>;

/// How attention is computed.
#[derive(Clone, Copy, Debug)]
enum Setting {
    /// `FusedBackward` before it took blocks: all scores at once, their probabilities computed
    /// again in backward.
    Whole,
    /// `FusedBackward`: blocks of queries.
    Blocks,
    /// `FusedBackward` over Burn's strategy that computes cheap operations again in backward.
    Balanced,
    /// Two products and a softmax in `FusedBackward`, which keeps the probabilities.
    Products,
    /// Burn's `Autodiff`.
    Autodiff,
}

/// The sizes of a step, in one batch.
#[derive(Clone, Copy)]
struct Sizes {
    tokens: usize,
    heads: usize,
    /// Of a head.
    width: usize,
    is_causal: bool,
    /// Of the transformer; 0 is attention alone.
    layers: usize,
}

#[derive(Clone, Copy)]
struct Step {
    milliseconds: f64,
    peak_bytes: f64,
    loss: f32,
}

/// Takes a step when it is called.
type Racer = Box<dyn Fn() -> Step>;

impl Setting {
    fn parse(name: &str) -> Self {
        match name {
            "whole" => Self::Whole,
            "blocks" => Self::Blocks,
            "balanced" => Self::Balanced,
            "products" => Self::Products,
            "autodiff" => Self::Autodiff,
            _ => panic!("{name}: whole, blocks, balanced, products or autodiff"),
        }
    }

    fn racer(self, sizes: Sizes) -> Racer {
        match self {
            Self::Whole => racer::<Fused>(sizes, whole::attention),
            Self::Blocks => racer::<Fused>(sizes, of_backend),
            Self::Balanced => racer::<Balanced>(sizes, of_backend),
            Self::Products => racer::<Fused>(sizes, products),
            Self::Autodiff => racer::<Plain>(sizes, of_backend),
        }
    }
}

fn of_backend<B: AutodiffBackend>(
    [query, key, value]: [Tensor<B, 4>; 3],
    is_causal: bool,
) -> Tensor<B, 4> {
    let options = AttentionModuleOptions {
        is_causal,
        ..Default::default()
    };
    module::attention(query, key, value, None, None, options)
}

fn products<B: AutodiffBackend>(
    [query, key, value]: [Tensor<B, 4>; 3],
    is_causal: bool,
) -> Tensor<B, 4> {
    let [_, _, tokens, width] = query.dims();
    let device = query.device();
    let mut scores = query
        .matmul(key.transpose())
        .div_scalar((width as f64).sqrt());
    if is_causal {
        let later = Tensor::<B, 2, Bool>::tril_mask([tokens, tokens], 0, &device);
        let later = later.unsqueeze::<4>().expand(scores.dims());
        scores = scores.mask_fill(later, f32::MIN);
    }
    softmax(scores, 3).matmul(value)
}

/// A block of a transformer with its norms before.
#[derive(Module, Debug)]
struct Block<B: AutodiffBackend> {
    attention_norm: LayerNorm<B>,
    query: Linear<B>,
    key: Linear<B>,
    value: Linear<B>,
    output: Linear<B>,
    norm: LayerNorm<B>,
    inner: Linear<B>,
    outer: Linear<B>,
}

impl<B: AutodiffBackend> Block<B> {
    fn new(width: usize, device: &B::Device) -> Self {
        let norm = || LayerNormConfig::new(width).init(device);
        let linear = |from, to| LinearConfig::new(from, to).init(device);
        Self {
            attention_norm: norm(),
            query: linear(width, width),
            key: linear(width, width),
            value: linear(width, width),
            output: linear(width, width),
            norm: norm(),
            inner: linear(width, 4 * width),
            outer: linear(4 * width, width),
        }
    }

    fn forward(&self, x: Tensor<B, 3>, sizes: Sizes, attention: Attention<B>) -> Tensor<B, 3> {
        let normed = self.attention_norm.forward(x.clone());
        let heads = [&self.query, &self.key, &self.value].map(|linear| {
            let of_tokens = linear.forward(normed.clone());
            let shape = [1, sizes.tokens, sizes.heads, sizes.width];
            of_tokens.reshape(shape).swap_dims(1, 2)
        });
        let attended = attention(heads, sizes.is_causal).swap_dims(1, 2);
        let attended = attended.reshape([1, sizes.tokens, sizes.heads * sizes.width]);
        let x = x + self.output.forward(attended);
        let inner = self.inner.forward(self.norm.forward(x.clone()));
        x + self.outer.forward(gelu(inner))
    }
}

/// Has taken a step already, which makes the parameters: from the same seed in every setting.
fn racer<B: AutodiffBackend>(sizes: Sizes, attention: Attention<B>) -> Racer {
    let device = B::Device::default();
    B::seed(&device, 42);
    let forward = if sizes.layers == 0 {
        attention_alone(sizes, attention, &device)
    } else {
        transformer(sizes, attention, &device)
    };
    measure(&forward);
    Box::new(move || measure(&forward))
}

type Forward<B> = Box<dyn Fn() -> Tensor<B, 1>>;

const NORMAL: Distribution = Distribution::Normal(0.0, 1.0);

fn attention_alone<B: AutodiffBackend>(
    sizes: Sizes,
    attention: Attention<B>,
    device: &B::Device,
) -> Forward<B> {
    let shape = [1, sizes.heads, sizes.tokens, sizes.width];
    let random = || Tensor::<B, 4>::random(shape, NORMAL, device);
    let operands = [(); 3].map(|()| random().require_grad());
    let weight = random();
    Box::new(move || (attention(operands.clone(), sizes.is_causal) * weight.clone()).sum())
}

fn transformer<B: AutodiffBackend>(
    sizes: Sizes,
    attention: Attention<B>,
    device: &B::Device,
) -> Forward<B> {
    let width = sizes.heads * sizes.width;
    let blocks: Vec<_> = (0..sizes.layers)
        .map(|_| Block::<B>::new(width, device))
        .collect();
    let x = Tensor::<B, 3>::random([1, sizes.tokens, width], NORMAL, device);
    Box::new(move || {
        let layer = |x, block: &Block<B>| block.forward(x, sizes, attention);
        blocks.iter().fold(x.clone(), layer).square().mean()
    })
}

fn measure<B: AutodiffBackend>(forward: &Forward<B>) -> Step {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let start = Instant::now();
    let loss = forward();
    let gradients = loss.backward();
    let milliseconds = 1e3 * start.elapsed().as_secs_f64();
    let peak_bytes = (HEAP.peak_usage() - before) as f64;
    drop(gradients);
    Step {
        milliseconds,
        peak_bytes,
        loss: loss.into_scalar().elem(),
    }
}

/// The middle one.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints a line for each setting.
fn race(sizes: Sizes, settings: &[&str], rounds: usize) {
    let racers: Vec<_> = settings
        .iter()
        .map(|name| Setting::parse(name).racer(sizes))
        .collect();
    let round = |_| -> Vec<Step> { racers.iter().map(|step| step()).collect() };
    let rounds: Vec<_> = (0..rounds).map(round).collect();
    for (at, name) in settings.iter().enumerate() {
        let of = |value: &dyn Fn(&[Step]) -> f64| median(rounds.iter().map(|round| value(round)));
        println!(
            "{},{},{},{name},{:.1},{:.3},{:.2},{:.3},{}",
            sizes.layers,
            sizes.tokens,
            sizes.is_causal,
            of(&|round| round[at].milliseconds),
            of(&|round| round[at].milliseconds / round[0].milliseconds),
            of(&|round| round[at].peak_bytes) / f64::from(1 << 20),
            of(&|round| round[at].peak_bytes / round[0].peak_bytes),
            rounds[0][at].loss,
        );
    }
}

fn main() {
    let option = |name: &str, default: &str| {
        let mut arguments = std::env::args().skip_while(|argument| argument != name);
        arguments.nth(1).unwrap_or_else(|| default.to_owned())
    };
    let numbers = |name: &str, default: &str| -> Vec<usize> {
        let text = option(name, default);
        let number = |text: &str| text.parse().expect("a number");
        text.split(',').map(number).collect()
    };
    let number = |name: &str, default: &str| numbers(name, default)[0];
    let settings = option("--settings", "whole,blocks,balanced,products,autodiff");
    let settings: Vec<_> = settings.split(',').collect();
    let rounds = number("--rounds", "7");

    println!("layers,tokens,causal,setting,milliseconds,times_first,peak_mib,of_first,loss");
    for layers in numbers("--layers", "0,1,4") {
        for tokens in numbers("--tokens", "128,256,512,1024,2048") {
            for is_causal in [false, true] {
                let sizes = Sizes {
                    tokens,
                    heads: number("--heads", "4"),
                    width: number("--width", "64"),
                    is_causal,
                    layers,
                };
                race(sizes, &settings, rounds);
            }
        }
    }
}
