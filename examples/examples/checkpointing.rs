//! Activation checkpointing: the backend's alias gets `Remat`, and a block goes into
//! `checkpoint(..)`, or nothing does and a byte budget decides.
//!
//! `cargo run --release --example checkpointing`

use std::time::Instant;

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::{MemoryBudget, Remat, RematStats, checkpoint};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

/// Counts the heap, for the figures below.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Was: `Autodiff<Flex>`. On a GPU: `Autodiff<Remat<Cuda>>`.
type B = Autodiff<Remat<Flex>>;

const ROWS: usize = 1024;
const WIDTH: usize = 128;
const BLOCKS: usize = 12;
const STEPS: usize = 4;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Block<B> {
    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}

#[derive(Module, Debug)]
struct Model<B: Backend> {
    blocks: Vec<Block<B>>,
}

impl<B: Backend> Model<B> {
    fn new(device: &B::Device) -> Self {
        let block = |_| Block {
            norm: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
            dropout: DropoutConfig::new(0.1).init(),
        };
        Self {
            blocks: (0..BLOCKS).map(block).collect(),
        }
    }

    fn forward(&self, mut x: Tensor<B, 2>, recompute: bool) -> Tensor<B, 2> {
        for block in &self.blocks {
            x = match recompute {
                true => checkpoint(|| block.forward(x)), // the line that changes
                false => block.forward(x),
            };
        }
        x
    }
}

/// Trains, and prints the most bytes that activations and gradients took in a step, and the
/// milliseconds of a step.
fn train(name: &str, recompute: bool, budget: Option<MemoryBudget>) -> Vec<f32> {
    let _budget = budget.map(MemoryBudget::install); // in force until dropped
    let device = Default::default();
    B::seed(&device, 1);
    let mut model = Model::<B>::new(&device);
    let mut optimizer = AdamWConfig::new().init();
    let x = Tensor::random([ROWS, WIDTH], Distribution::Default, &device);
    let mut losses = Vec::new();
    let (mut peak, mut fastest) = (0, f64::INFINITY);
    for step in 0..STEPS {
        let (held, begin) = (HEAP.current_usage(), Instant::now());
        HEAP.reset_peak_usage();
        let loss = (model.forward(x.clone(), recompute) - x.clone().flip([1]))
            .square()
            .mean();
        losses.push(loss.clone().into_scalar());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        if step > 0 {
            // A budget that is a fraction measures the first step, unconstrained.
            peak = peak.max(HEAP.peak_usage() - held);
            fastest = f64::min(fastest, begin.elapsed().as_secs_f64());
        }
        model = optimizer.step(1e-3, model, gradients);
    }
    let replayed = RematStats::of_thread().replayed_operations;
    let (mib, ms) = (peak as f64 / f64::from(1 << 20), fastest * 1e3);
    println!("{name:<28} {mib:6.1} MiB {ms:6.0} ms, {replayed:4} operations replayed so far");
    losses
}

fn main() {
    let plain = train("plain", false, None);
    let blocks = train("every block recomputed", true, None);
    let budget = MemoryBudget::fraction(0.4).expect("between 0 and 1");
    let budget = train("a budget of 40 %", false, Some(budget));
    assert_eq!(plain, blocks);
    assert_eq!(plain, budget);
    println!("The losses of all three are equal, bit for bit, dropout included: {plain:?}");
}
