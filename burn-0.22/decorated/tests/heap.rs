//! Memory is really freed: the peak of the heap of one step, above what was there before. One test, for the allocator is the
//! process's.
//!
//! 24 blocks of layer norm, linear(256, 1024), GELU, linear, residual on 1024 tokens, as burn-checkpoint's `chain` bench has them on
//! Burn 0.21. 49 MiB are the gradients.

use burn::module::Module;
use burn::nn::{Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::{Device, Distribution, Tensor};
use burn_decorated::{MemoryBudget, Policy, checkpoint_with};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const BLOCKS: usize = 24;
const WIDTH: usize = 256;
const TOKENS: usize = 1024;

#[derive(Module, Debug)]
struct Block {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Block {
    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let hidden = Gelu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}

/// MiB that a step takes at most, and the bits of its loss.
fn step(blocks: &[Block], x: &Tensor<2>, policy: Option<Policy>) -> (f64, u32) {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let mut y = x.clone();
    for block in blocks {
        y = match &policy {
            None => block.forward(y),
            Some(policy) => checkpoint_with(policy.clone(), || block.forward(y)),
        };
    }
    let loss = y.mean();
    let grads = loss.backward();
    let peak = (HEAP.peak_usage() - before) as f64 / f64::from(1 << 20);
    drop(grads);
    (peak, loss.into_scalar::<f32>().to_bits())
}

#[test]
fn the_heap_falls_as_on_0_21() {
    let device = Device::flex().autodiff();
    device.seed(7);
    let block = |_| Block {
        norm: LayerNormConfig::new(WIDTH).init(&device),
        up: LinearConfig::new(WIDTH, 4 * WIDTH).init(&device),
        down: LinearConfig::new(4 * WIDTH, WIDTH).init(&device),
    };
    let blocks: Vec<Block> = (0..BLOCKS).map(block).collect();
    let x = Tensor::random([TOKENS, WIDTH], Distribution::Normal(0.0, 1.0), &device);
    let _ = step(&blocks, &x, None); // weights are made at their first use
    let (plain, bits) = step(&blocks, &x, None);
    println!("plain {plain:.0} MiB");
    let limited = |percent: u32| {
        let bytes = plain * f64::from(1 << 20) * f64::from(percent) / 100.0;
        let _budget = MemoryBudget::bytes(bytes as u64).install();
        step(&blocks, &x, None)
    };
    // At most so much of the plain peak. On 0.21 the first two were 68 and 135 of 275 MiB; a budget is in bytes, to which temporaries of
    // an operation are added.
    for (name, found, at_most) in [
        (
            "every block",
            step(&blocks, &x, Some(Policy::Recompute)),
            0.28,
        ),
        (
            "keep compute",
            step(&blocks, &x, Some(Policy::KeepCompute)),
            0.55,
        ),
        ("budget 60 %", limited(60), 0.64),
        ("budget 40 %", limited(40), 0.44),
    ] {
        println!("{name} {:.0} MiB, {:.2} of plain", found.0, found.0 / plain);
        assert_eq!(found.1, bits, "{name}");
        assert!(
            found.0 <= at_most * plain,
            "{name}: {:.0} of {plain:.0} MiB",
            found.0
        );
    }
}
