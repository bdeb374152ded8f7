//! A plan against the automatic budget: the same 24 blocks, the same limit, interleaved in one run.
//!
//! `cargo bench --workspace --bench plan_or_budget`; some minutes. Peaks are those of the heap
//! above what is there before a step, times the median of the rounds; the same bits are those of
//! the loss and of all gradients of the plain chain.

#[path = "../tests/block/bits.rs"]
mod bits;
#[path = "../tests/block/mod.rs"]
mod block;

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Tensor};
use burn_checkpoint::plan::{Plan, plan, simulate};
use burn_checkpoint::{
    MemoryBudget, Remat, RematStats, checkpoint_chain, profile_chain, profile_tail,
};
use burn_flex::Flex;
use peak_alloc::PeakAlloc;

use bits::bits;
use block::Block;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Remat<Flex>>;

const BLOCKS: usize = 24;
const WIDTH: usize = 256;
const TOKENS: usize = 1024;
const ROUNDS: usize = 5;
const MIB: f64 = 1024.0 * 1024.0;

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
    /// Those of the loss and of all gradients.
    bits: u64,
}

impl Row {
    fn new(name: impl Into<String>, way: Way) -> Self {
        Self {
            name: name.into(),
            way,
            times: Vec::new(),
            peak_bytes: 0,
            replayed: 0,
            bits: 0,
        }
    }

    fn step(&mut self, blocks: &Vec<Block<B>>, x: &Tensor<B, 2>) {
        let before_bytes = HEAP.current_usage();
        HEAP.reset_peak_usage();
        RematStats::reset_thread();
        let start = Instant::now();
        let plain = Plan::plain(BLOCKS);
        let (budget, plan) = match &self.way {
            Way::Scopes(plan) => (None, plan),
            Way::Budget(bytes) => (Some(MemoryBudget::bytes(*bytes).install()), &plain),
        };
        let x = x.clone().require_grad();
        let out = checkpoint_chain(blocks, x, plan, Block::forward).expect("as many blocks");
        let loss = loss(out);
        let grads = loss.clone().backward();
        self.times.push(start.elapsed());
        self.peak_bytes = HEAP.peak_usage().saturating_sub(before_bytes);
        self.replayed = RematStats::of_thread().replayed_operations;
        self.bits = bits(blocks, loss, &grads);
        drop((grads, budget));
    }

    fn median(&self) -> Duration {
        let mut times = self.times.clone();
        times.sort();
        times[times.len() / 2]
    }
}

fn main() {
    let device = Default::default();
    B::seed(&device, 1);
    let blocks: Vec<Block<B>> = (0..BLOCKS)
        .map(|_| Block::new(WIDTH, 4 * WIDTH, 0.0, &device))
        .collect();
    let x = Tensor::random([TOKENS, WIDTH], Distribution::Default, &device);
    // The first step of a process takes longer.
    Row::new("", Way::Scopes(Plan::plain(BLOCKS))).step(&blocks, &x);

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
                println!("{percent} %, {limit:.0} MiB: {found:?}");
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
        "{:<14}{:>10}{:>10}{:>8}{:>10}{:>11}",
        "", "peak MiB", "ms", "x", "replayed", "same bits"
    );
    for row in &rows {
        let seconds = row.median().as_secs_f64();
        let peak = row.peak_bytes as f64 / MIB;
        let (milliseconds, times) = (seconds * 1e3, seconds / base);
        let (name, replayed, same) = (&row.name, row.replayed, row.bits == rows[0].bits);
        println!("{name:<14}{peak:>10.1}{milliseconds:>10.0}{times:>8.3}{replayed:>10}{same:>11}");
    }
}
