//! Ways to save memory side by side: peak bytes of the heap and time of a forward and backward pass over 24 blocks of layer
//! norm, linear, GELU, linear and residual, width 256, 1024 tokens.
//!
//! `cargo bench -p burn-checkpoint --bench blocks [rounds]`. Rounds are interleaved; times are medians.

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Distribution, Tensor};
use burn_autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn_checkpoint::{MemoryBudget, Policy, Remat, RematStats, checkpoint, checkpoint_with};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const BLOCKS: usize = 24;
const WIDTH: usize = 256;
const TOKENS: usize = 1024;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Block<B> {
    fn new(device: &B::Device, dropout: f64) -> Self {
        let block = Self {
            norm: LayerNormConfig::new(WIDTH).init(device),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        };
        // Parameters are made at their first use.
        let _ = (block.up.weight.val(), block.down.weight.val());
        block
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let y = Gelu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(y))
    }
}

/// How memory is saved.
#[derive(Clone)]
enum Mode {
    None,
    Scopes(Policy),
    /// Scopes of six blocks, each block a scope of its own in it.
    Nested,
    Budget(f64),
}

/// What one pass takes.
struct Pass {
    time: Duration,
    peak_bytes: f64,
    stats: RematStats,
}

fn pass<B: AutodiffBackend>(mode: &Mode, dropout: f64, tape_bytes: f64) -> Pass {
    let device = Default::default();
    let blocks: Vec<_> = (0..BLOCKS)
        .map(|_| Block::<B>::new(&device, dropout))
        .collect();
    let x = Tensor::<B, 2>::random([TOKENS, WIDTH], Distribution::Default, &device);
    let budget = match mode {
        Mode::Budget(fraction) => {
            Some(MemoryBudget::bytes((tape_bytes * fraction) as u64).install())
        }
        _ => None,
    };
    RematStats::reset_thread();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let start = Instant::now();
    let mut y = x;
    match mode {
        Mode::None | Mode::Budget(_) => {
            for block in &blocks {
                y = block.forward(y);
            }
        }
        Mode::Scopes(policy) => {
            for block in &blocks {
                y = checkpoint_with(policy.clone(), || block.forward(y));
            }
        }
        Mode::Nested => {
            for blocks in blocks.chunks(6) {
                y = checkpoint(|| {
                    blocks
                        .iter()
                        .fold(y, |y, block| checkpoint(|| block.forward(y)))
                });
            }
        }
    }
    let grads = y.powf_scalar(2.0).mean().backward();
    let time = start.elapsed();
    let peak_bytes = HEAP.peak_usage() as f64 - before as f64;
    drop((grads, budget));
    Pass {
        time,
        peak_bytes,
        stats: RematStats::of_thread(),
    }
}

type Run = (&'static str, Box<dyn Fn(f64) -> Pass>);

fn runs(dropout: f64) -> Vec<Run> {
    type Plain = Autodiff<Flex>;
    type Balanced = Autodiff<Flex, BalancedCheckpointing>;
    type Managed = Autodiff<Remat<Flex>>;
    fn run<B: AutodiffBackend>(name: &'static str, mode: Mode, dropout: f64) -> Run {
        (name, Box::new(move |tape| pass::<B>(&mode, dropout, tape)))
    }
    vec![
        run::<Plain>("plain", Mode::None, dropout),
        run::<Managed>("Remat, no scope", Mode::None, dropout),
        run::<Balanced>("BalancedCheckpointing", Mode::None, dropout),
        run::<Managed>("every block", Mode::Scopes(Policy::Recompute), dropout),
        run::<Managed>("keep-compute", Mode::Scopes(Policy::KeepCompute), dropout),
        run::<Managed>("offload", Mode::Scopes(Policy::Offload), dropout),
        run::<Managed>("nested 4 x 6", Mode::Nested, dropout),
        run::<Managed>("budget 60 %", Mode::Budget(0.6), dropout),
        run::<Managed>("budget 40 %", Mode::Budget(0.4), dropout),
        run::<Managed>("budget 25 %", Mode::Budget(0.25), dropout),
        run::<Managed>("budget 20 %", Mode::Budget(0.20), dropout),
    ]
}

/// The managed bytes of a pass if nothing is evicted.
fn tape_bytes(dropout: f64) -> f64 {
    let huge = Mode::Budget(1.0);
    pass::<Autodiff<Remat<Flex>>>(&huge, dropout, 1e15)
        .stats
        .peak_bytes as f64
}

fn main() {
    let rounds = std::env::args().find_map(|x| x.parse().ok()).unwrap_or(5);
    for dropout in [0.0, 0.1] {
        let tape = tape_bytes(dropout);
        let mib = 1024.0 * 1024.0;
        println!(
            "dropout {dropout}, tape {:.0} MiB, {rounds} rounds",
            tape / mib
        );
        println!("| | ms | of plain | peak MiB | replayed | in ms |");
        println!("|---|---|---|---|---|---|");
        let runs = runs(dropout);
        let mut times = vec![Vec::new(); runs.len()];
        let mut last: Vec<Option<Pass>> = runs.iter().map(|_| None).collect();
        for _ in 0..rounds {
            for (index, (_, run)) in runs.iter().enumerate() {
                let pass = run(tape);
                times[index].push(pass.time);
                last[index] = Some(pass);
            }
        }
        let median = |times: &mut Vec<Duration>| {
            times.sort();
            times[times.len() / 2].as_secs_f64() * 1e3
        };
        let plain = median(&mut times[0].clone());
        for (((name, _), times), pass) in runs.iter().zip(&mut times).zip(last) {
            let Some(pass) = pass else { continue };
            let time = median(times);
            println!(
                "| {name} | {time:.0} | {:.2} | {:.0} | {} | {:.0} |",
                time / plain,
                pass.peak_bytes / mib,
                pass.stats.replayed_operations,
                pass.stats.replay_time.as_secs_f64() * 1e3
            );
        }
    }
}
