//! A budget on many small operations against the same step without one, interleaved in one run.
//!
//! `cargo bench --workspace --bench many_small`; about two minutes.

#[path = "../tests/many/mod.rs"]
mod many;

use std::time::{Duration, Instant};

use burn::backend::Autodiff;
use burn_checkpoint::{InstalledBudget, MemoryBudget, Remat, RematStats};
use burn_flex::Flex;

use many::{Ctc, Lstm, Step};

type B = Autodiff<Remat<Flex>>;

/// Steps before a timed one: in the first the sizes of results are learnt, in the second tensors
/// are evicted as in every later one.
const BEFORE: usize = 2;

fn timed(step: &impl Step<B>, budget: Option<&InstalledBudget>) -> Duration {
    let start = Instant::now();
    std::hint::black_box(step.run());
    if let Some(budget) = budget {
        budget.step();
    }
    start.elapsed()
}

/// The quartiles, the median in the middle.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

/// Prints medians and quartiles of so many rounds. A ratio is that of two steps of one round,
/// because the speed of a shared machine changes meanwhile.
fn compare(name: &str, step: &impl Step<B>, fraction: f64, rounds: usize) {
    let mut parts = std::env::args().skip(1);
    if parts.any(|part| !part.starts_with('-') && !name.contains(&part)) {
        return;
    }
    let budget = MemoryBudget::fraction(fraction).expect("a fraction");
    let budget = budget.install();
    timed(step, Some(&budget));
    let limit = budget.limit_bytes()[0].expect("measured");
    drop(budget);
    let limits = [None, Some(u64::MAX / 2), Some(limit)];
    let mut times = Vec::new();
    let mut stats = RematStats::default();
    for _ in 0..rounds {
        times.push(limits.map(|limit| {
            let budget = limit.map(|limit| MemoryBudget::bytes(limit).install());
            for _ in 0..BEFORE {
                timed(step, budget.as_ref());
            }
            RematStats::reset_thread();
            let time = timed(step, budget.as_ref());
            stats = RematStats::of_thread();
            time.as_secs_f64()
        }));
    }
    let of = |value: fn(&[f64; 3]) -> f64| quartiles(times.iter().map(value).collect());
    let [low, fits, high] = of(|[plain, fits, _]| fits / plain);
    let [lowest, limited, highest] = of(|[plain, _, limited]| limited / plain);
    println!(
        "{name} at {:.0} %: {:.1} ms without a budget, {fits:.2} times with one that fits ({low:.2} to {high:.2}), {limited:.2} times with \
         this one ({lowest:.2} to {highest:.2}); {stats:?}",
        fraction * 100.0,
        of(|[plain, ..]| 1e3 * plain)[1],
    );
}

fn main() {
    compare("lstm", &Lstm::new(), 0.4, 41);
    compare("ctc", &Ctc::new(400), 0.37, 41);
    // The batch of PyTorch's example of `CTCLoss`: operations on four kilobytes.
    compare("ctc of 16", &Ctc::of([400, 16, 20], 30), 0.37, 15);
}
