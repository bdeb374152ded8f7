//! The time that an estimate takes: two updates of a transformer with AdamW, of which the second
//! counts.
//!
//!     cargo bench --workspace --bench estimate
//!
//! prints seconds, peak and replays for 7 and 70 billion parameters, as they are, with every layer
//! recomputed, and under a byte budget, and fails if one takes 10 seconds or more.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::nn::transformer::{
    TransformerEncoder, TransformerEncoderConfig, TransformerEncoderInput,
};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn_checkpoint::{MemoryBudget, Remat, checkpoint};
use burn_estimate::{Estimate, Meta, MetaDevice, estimate_on};

type B = Autodiff<Remat<Meta>>;

/// Goal of issue 15.
const MOST: Duration = Duration::from_secs(10);

/// Tokens of a sequence, of which a batch has one.
const CONTEXT: usize = 2048;

/// Layers and width: 12 times layers times width² parameters.
const SHAPES: [(&str, usize, usize, usize); 2] = [("7B", 34, 4096, 32), ("70B", 87, 8192, 64)];

/// What becomes of activations.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Activations {
    Kept,
    Recomputed,
    Budget(u64),
}

fn main() -> ExitCode {
    let settings = [
        Activations::Kept,
        Activations::Recomputed,
        Activations::Budget(20 << 30),
    ];
    let mut slowest = Duration::ZERO;
    for (name, layers, width, heads) in SHAPES {
        for activations in settings {
            let start = Instant::now();
            let estimate = update(layers, width, heads, activations);
            let took = start.elapsed();
            slowest = slowest.max(took);
            println!(
                "{name:4} {:20} {:6.2} s  {:8.2} GiB  {:7} operations, {:7} of them replayed",
                format!("{activations:?}"),
                took.as_secs_f64(),
                estimate.peak_bytes as f64 / f64::from(1 << 30),
                estimate.operations,
                estimate.replayed_operations,
            );
        }
    }
    ExitCode::from(u8::from(slowest >= MOST))
}

fn update(layers: usize, width: usize, heads: usize, activations: Activations) -> Estimate {
    let device = MetaDevice::cuda(0);
    let config = TransformerEncoderConfig::new(width, 4 * width, heads, 1);
    let model: Vec<TransformerEncoder<B>> = (0..layers).map(|_| config.init(&device)).collect();
    let _budget = match activations {
        Activations::Budget(bytes) => Some(MemoryBudget::bytes(bytes).install()),
        _ => None,
    };
    let mut optimizer = AdamWConfig::new().init::<B, Vec<TransformerEncoder<B>>>();
    let (estimate, _) = estimate_on::<B, _>(device, model, |model| {
        let x = Tensor::<B, 3>::zeros([1, CONTEXT, width], &device);
        let y = model.iter().fold(x, |x, layer| {
            let forward = || layer.forward(TransformerEncoderInput::new(x));
            match activations {
                Activations::Recomputed => checkpoint(forward),
                _ => forward(),
            }
        });
        let gradients = GradientsParams::from_grads(y.mean().backward(), &model);
        optimizer.step(1e-4, model, gradients)
    });
    estimate
}
