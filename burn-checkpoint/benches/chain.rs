//! Time and memory of one training step of a chain of blocks, every way to hold its activations
//! side by side.
//!
//!     cargo bench --workspace --bench chain [-- --rounds 10]
//!
//! 24 blocks of layer norm, linear(256, 1024), GELU, linear, residual on 1024 tokens, on burn-flex.
//! In every round each setting takes one step, so what disturbs the machine disturbs all of them
//! alike; ratios are taken within a round. Peak bytes are the heap's above what was there before
//! the step: activations, gradients and temporaries, without parameters. `torch_chain.py` beside
//! this file is the same in PyTorch.

#[path = "../tests/block/bits.rs"]
mod bits;
#[path = "../tests/block/mod.rs"]
mod block;

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Instant;

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::strategy::BalancedCheckpointing;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, Tensor};
use burn_backend::BackendTypes;
use burn_checkpoint::{
    InstalledBudget, MemoryBudget, Policy, Remat, RematStats, apart, checkpoint, checkpoint_with,
};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

use bits::bits;
use block::Block;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const BLOCKS: usize = 24;
const WIDTH: usize = 256;
const TOKENS: usize = 1024;

type Plain = Autodiff<Flex>;
type Balanced = Autodiff<Flex, BalancedCheckpointing>;
type Managed = Autodiff<Remat<Flex>>;

/// A way to hold activations.
#[derive(Clone, Copy, Debug)]
enum Setting {
    /// Without burn-checkpoint.
    Bare,
    /// Burn's own, which computes some operations once more.
    Balanced,
    /// `Remat` in the stack, and nothing asked of it.
    NoScope,
    EveryBlock,
    /// Scopes in scopes: so many outer ones.
    Nested(usize),
    KeepCompute,
    Offload,
    /// By a budget alone, in percent of what a step takes without.
    Budget(u8),
}

const SETTINGS: &[Setting] = &[
    Setting::Bare,
    Setting::Balanced,
    Setting::NoScope,
    Setting::EveryBlock,
    Setting::Nested(6),
    Setting::KeepCompute,
    Setting::Offload,
    Setting::Budget(60),
    Setting::Budget(40),
    Setting::Budget(25),
];

/// What one step took.
#[derive(Clone, Copy, Debug, Default)]
struct Step {
    milliseconds: f64,
    peak_bytes: usize,
    replayed: u64,
    /// Those of the loss and of all gradients, by which settings are compared.
    bits: u64,
}

impl Setting {
    fn name(self) -> String {
        match self {
            Self::Bare => "plain".into(),
            Self::Balanced => "Burn's BalancedCheckpointing".into(),
            Self::NoScope => "Remat, no scope".into(),
            Self::EveryBlock => "every block".into(),
            Self::Nested(outer) => format!("nested, {outer} x {}", BLOCKS / outer),
            Self::KeepCompute => "every block, keep compute".into(),
            Self::Offload => "every block, offload".into(),
            Self::Budget(percent) => format!("budget {percent} %"),
        }
    }

    /// Takes a step whenever asked, on this thread: counters are a thread's, and its budget is
    /// apart from those of the other settings.
    fn serve(self, asked: &Receiver<()>, done: &Sender<Step>) {
        let _apart = apart();
        let budget = match self {
            Self::Budget(percent) => {
                let budget = MemoryBudget::fraction(f64::from(percent) / 100.0);
                Some(budget.expect("a fraction").install())
            }
            _ => None,
        };
        match self {
            Self::Bare => self.steps::<Plain>(None, asked, done),
            Self::Balanced => self.steps::<Balanced>(None, asked, done),
            _ => self.steps::<Managed>(budget, asked, done),
        }
    }

    fn steps<B: AutodiffBackend<Device = <Flex as BackendTypes>::Device>>(
        self,
        budget: Option<InstalledBudget>,
        asked: &Receiver<()>,
        done: &Sender<Step>,
    ) {
        // Asked for the first time: one thread after the other, since they share the random
        // generator.
        if asked.recv().is_err() {
            return;
        }
        let device = Default::default();
        B::seed(&device, 42);
        let blocks: Vec<Block<B>> = (0..BLOCKS)
            .map(|_| Block::new(WIDTH, 4 * WIDTH, 0.0, &device))
            .collect();
        let x = Tensor::<B, 2>::random([TOKENS, WIDTH], Distribution::Normal(0.0, 1.0), &device);
        loop {
            let step = self.step(&blocks, x.clone());
            if let Some(budget) = &budget {
                // The same batch and the same weights again: nothing else tells where a step
                // begins.
                budget.step();
            }
            if done.send(step).is_err() || asked.recv().is_err() {
                return;
            }
        }
    }

    fn step<B: AutodiffBackend>(self, blocks: &Vec<Block<B>>, x: Tensor<B, 2>) -> Step {
        RematStats::reset_thread();
        HEAP.reset_peak_usage();
        let before = HEAP.current_usage();
        let start = Instant::now();
        let y = self.forward(blocks, x);
        let loss = y.powi_scalar(2).mean();
        let grads = loss.clone().backward();
        let milliseconds = 1e3 * start.elapsed().as_secs_f64();
        let peak_bytes = HEAP.peak_usage() - before;
        Step {
            milliseconds,
            peak_bytes,
            replayed: RematStats::of_thread().replayed_operations,
            bits: bits(blocks, loss, &grads),
        }
    }

    fn forward<B: AutodiffBackend>(self, blocks: &[Block<B>], x: Tensor<B, 2>) -> Tensor<B, 2> {
        let each = |policy: &Policy, blocks: &[Block<B>], x| {
            blocks.iter().fold(x, |x, block| {
                checkpoint_with(policy.clone(), || block.forward(x))
            })
        };
        match self {
            Self::EveryBlock => each(&Policy::Recompute, blocks, x),
            Self::KeepCompute => each(&Policy::KeepCompute, blocks, x),
            Self::Offload => each(&Policy::Offload, blocks, x),
            Self::Nested(outer) => blocks.chunks(BLOCKS / outer).fold(x, |x, chunk| {
                checkpoint(|| each(&Policy::Recompute, chunk, x))
            }),
            _ => blocks.iter().fold(x, |x, block| block.forward(x)),
        }
    }
}

/// The middle one.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let rounds = std::env::args()
        .skip_while(|argument| argument != "--rounds")
        .nth(1)
        .map_or(10, |rounds| rounds.parse().expect("a number of rounds"));

    let racers: Vec<_> = SETTINGS
        .iter()
        .map(|setting| {
            let (ask, asked) = channel();
            let (done, result) = channel();
            thread::spawn(move || setting.serve(&asked, &done));
            (setting, ask, result)
        })
        .collect();
    let round = || -> Vec<Step> {
        let step = |(_, ask, result): &(_, Sender<()>, Receiver<Step>)| {
            ask.send(()).expect("alive");
            result.recv().expect("no panic")
        };
        racers.iter().map(step).collect()
    };
    // Two that do not count: a relative budget measures in its first step.
    round();
    round();
    let taken: Vec<Vec<Step>> = (0..rounds).map(|_| round()).collect();

    println!("{BLOCKS} blocks, {TOKENS} x {WIDTH}, burn-flex, {rounds} rounds\n");
    println!(
        "| setting | ms a step | times plain | peak MiB | of plain | operations replayed | same bits |"
    );
    println!("|---|---:|---:|---:|---:|---:|---|");
    for (number, (setting, ..)) in racers.iter().enumerate() {
        let of = |value: &dyn Fn(&[Step]) -> f64| {
            median(taken.iter().map(|round| value(round)).collect())
        };
        let plain_peak = of(&|round| round[0].peak_bytes as f64);
        let peak = of(&|round| round[number].peak_bytes as f64);
        println!(
            "| {} | {:.0} | {:.3} | {:.1} | {:.0} % | {:.0} | {} |",
            setting.name(),
            of(&|round| round[number].milliseconds),
            of(&|round| round[number].milliseconds / round[0].milliseconds),
            peak / f64::from(1 << 20),
            100.0 * peak / plain_peak,
            of(&|round| round[number].replayed as f64),
            taken
                .iter()
                .all(|round| round[number].bits == round[0].bits),
        );
    }
}
