//! A plan against the automatic budget: the same 24 blocks, the same limit, interleaved in one run.
//!
//! `cargo bench -p burn-checkpoint --bench plan_or_budget`; some minutes. Peaks are those of the heap above what is there
//! before a step, times the median of the rounds.

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::gelu;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::plan::{Plan, plan, simulate};
use burn_checkpoint::{
    MemoryBudget, Remat, RematStats, checkpoint_chain, profile_chain, profile_tail,
};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Remat<Flex>>;

const BLOCKS: usize = 24;
const WIDTH: usize = 256;
const TOKENS: usize = 1024;
const ROUNDS: usize = 5;
const MIB: f64 = 1024.0 * 1024.0;

#[derive(Module, Debug)]
struct Block<B: Backend> {
    norm: LayerNorm<B>,
    up: Linear<B>,
    down: Linear<B>,
}

impl Block<B> {
    fn new() -> Self {
        let device = Default::default();
        Self {
            norm: LayerNormConfig::new(WIDTH).init(&device),
            up: LinearConfig::new(WIDTH, 4 * WIDTH).init(&device),
            down: LinearConfig::new(4 * WIDTH, WIDTH).init(&device),
        }
    }

    fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = gelu(self.up.forward(self.norm.forward(x.clone())));
        x + self.down.forward(hidden)
    }
}

fn loss(x: Tensor<B, 2>) -> Tensor<B, 1> {
    (x.clone() * x).mean()
}

/// A way to stay within a limit.
enum Way {
    Scopes(Plan),
    Budget(u64),
}

struct Row {
    name: String,
    way: Way,
    times: Vec<Duration>,
    peak_bytes: usize,
    replayed: u64,
}

impl Row {
    fn new(name: impl Into<String>, way: Way) -> Self {
        Self {
            name: name.into(),
            way,
            times: Vec::new(),
            peak_bytes: 0,
            replayed: 0,
        }
    }

    fn step(&mut self, blocks: &[Block<B>], x: &Tensor<B, 2>) {
        let before_bytes = HEAP.current_usage();
        HEAP.reset_peak_usage();
        RematStats::reset_thread();
        let start = Instant::now();
        match &self.way {
            Way::Scopes(plan) => train(blocks, x, plan),
            Way::Budget(bytes) => {
                let budget = MemoryBudget::bytes(*bytes).install();
                train(blocks, x, &Plan::plain(BLOCKS));
                drop(budget);
            }
        }
        self.times.push(start.elapsed());
        self.peak_bytes = HEAP.peak_usage().saturating_sub(before_bytes);
        self.replayed = RematStats::of_thread().replayed_operations;
    }

    fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort();
        times[times.len() / 2]
    }
}

fn train(blocks: &[Block<B>], x: &Tensor<B, 2>, plan: &Plan) {
    let x = x.clone().require_grad();
    let out = checkpoint_chain(blocks, x, plan, Block::forward).expect("as many blocks");
    drop(loss(out).backward());
}

fn main() {
    let device = Default::default();
    B::seed(&device, 1);
    let blocks: Vec<Block<B>> = (0..BLOCKS).map(|_| Block::new()).collect();
    let x = Tensor::random([TOKENS, WIDTH], Distribution::Default, &device);
    train(&blocks, &x, &Plan::plain(BLOCKS));

    let mut profile = profile_chain(&blocks, x.clone(), Block::forward).expect("Remat counts");
    profile.base_bytes = 0;
    profile.tail = profile_tail(x.clone(), loss);
    let plain = Plan::plain(BLOCKS);
    let plain_bytes = simulate(&profile, &plain)
        .expect("as many blocks")
        .peak_bytes;

    let mut rows = vec![
        Row::new("plain", Way::Scopes(plain)),
        Row::new("every block", Way::Scopes(Plan::every_block(BLOCKS))),
    ];
    for percent in [60, 40, 25] {
        let limit_bytes = plain_bytes * percent / 100;
        let limit = limit_bytes as f64 / MIB;
        match plan(&profile, limit_bytes) {
            Ok(found) => {
                println!("{percent} %, {limit:.0} MiB: {found}");
                rows.push(Row::new(format!("plan {percent} %"), Way::Scopes(found)));
            }
            Err(error) => println!("{percent} %, {limit:.0} MiB: {error}"),
        }
        rows.push(Row::new(
            format!("budget {percent} %"),
            Way::Budget(limit_bytes),
        ));
    }
    for _ in 0..ROUNDS {
        for row in &mut rows {
            row.step(&blocks, &x);
        }
    }

    let base = rows[0].median().as_secs_f64();
    println!(
        "{:<14}{:>10}{:>10}{:>8}{:>10}",
        "", "peak MiB", "ms", "x", "replayed"
    );
    for row in &rows {
        let seconds = row.median().as_secs_f64();
        let peak = row.peak_bytes as f64 / MIB;
        let (milliseconds, times) = (seconds * 1e3, seconds / base);
        let (name, replayed) = (&row.name, row.replayed);
        println!("{name:<14}{peak:>10.1}{milliseconds:>10.0}{times:>8.3}{replayed:>10}");
    }
}
