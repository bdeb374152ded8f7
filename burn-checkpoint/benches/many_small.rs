//! A budget on many small operations against the same step without one, interleaved in one run.
//!
//! `cargo bench --workspace --bench many_small`; some seconds.

#[path = "../tests/many/mod.rs"]
mod many;

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn_checkpoint::{InstalledBudget, MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use many::{Ctc, Lstm, Step};

type B = Autodiff<Remat<Flex>>;

/// Each is the median of so many steps.
const ROUNDS: usize = 9;

/// Steps before a timed one: in the first the sizes of results are learnt, in the second tensors are evicted as in every later one.
const BEFORE: usize = 2;

fn timed(step: &impl Step<B>, budget: Option<&InstalledBudget>) -> Duration {
    let start = Instant::now();
    std::hint::black_box(step.run());
    if let Some(budget) = budget {
        budget.step();
    }
    start.elapsed()
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() / 2]
}

fn compare(name: &str, step: &impl Step<B>, fraction: f64) {
    if std::env::args()
        .any(|part| !part.starts_with('-') && part.len() < 9 && !name.contains(&part))
    {
        return;
    }
    let budget = MemoryBudget::fraction(fraction).expect("a fraction");
    let budget = budget.install();
    timed(step, Some(&budget));
    let limit = budget.limit_bytes()[0].expect("measured");
    drop(budget);
    let limits = [None, Some(u64::MAX / 2), Some(limit)];
    let mut times = limits.map(|_| Vec::new());
    let mut stats = RematStats::default();
    for _ in 0..ROUNDS {
        for (limit, times) in limits.iter().zip(&mut times) {
            let budget = limit.map(|limit| MemoryBudget::bytes(limit).install());
            for _ in 0..BEFORE {
                timed(step, budget.as_ref());
            }
            RematStats::reset_thread();
            times.push(timed(step, budget.as_ref()));
            stats = RematStats::of_thread();
        }
    }
    let [plain, recorded, limited] = times.map(median);
    println!(
        "{name} at {:.0} %: {plain:?} without a budget, {recorded:?} with one that fits, {limited:?} ({:.2} times); {stats:?}",
        fraction * 100.0,
        limited.as_secs_f64() / plain.as_secs_f64(),
    );
}

fn main() {
    compare("lstm", &Lstm::new(), 0.4);
    compare("ctc", &Ctc::new(400), 0.37);
}
