//! Time and memory of the loss over a vocabulary with its backward pass: full logits,
//! `linear_cross_entropy`, and chunks in scopes.
//!
//!     cargo bench --workspace --bench linear_cross_entropy [-- --rows 2048 --width 512 --classes 2000,8000,32000 --rounds 5]
//!
//! On burn-flex, f32, random numbers. In every round each setting takes one step, so what disturbs
//! the machine disturbs all of them alike; ratios are taken within a round. Peak bytes are the
//! heap's above what was there before the step: hidden states, weight and targets are not counted,
//! gradients are. One CSV line for each number of classes and setting.
//! `torch_linear_cross_entropy.py` beside this file is the same in PyTorch.

use std::time::Instant;

use burn::backend::Autodiff;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::backend::Backend;
use burn::tensor::{Distribution, Int, Tensor};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;
use burn_fused::{Chunk, LinearCrossEntropyLossConfig};
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Remat<Flex>>;

/// How the loss is computed.
#[derive(Clone, Copy)]
enum Setting {
    /// Burn's `CrossEntropyLoss` over all logits.
    Full,
    /// `linear_cross_entropy`, gradients always in the forward pass.
    Chunked(Chunk),
    /// Burn's `CrossEntropyLoss` over chunks of so many rows, each in a checkpoint scope: its
    /// logits are computed once more in backward.
    Scopes(usize),
}

struct Problem {
    hidden: Tensor<B, 2>,
    weight: Tensor<B, 2>,
    targets: Tensor<B, 1, Int>,
}

#[derive(Clone, Copy)]
struct Step {
    milliseconds: f64,
    peak_bytes: f64,
    loss: f32,
}

impl Setting {
    fn parse(name: &str) -> Self {
        let number = |text: &str| text.parse().expect("a number of rows");
        match name.split_once('=') {
            None if name == "full" => Self::Full,
            None if name == "chunked" => Self::Chunked(Chunk::Auto),
            Some(("chunked", rows)) => Self::Chunked(Chunk::Rows(number(rows))),
            Some(("scopes", rows)) => Self::Scopes(number(rows)),
            _ => panic!("{name}: full, chunked, chunked=ROWS or scopes=ROWS"),
        }
    }

    fn loss(self, problem: &Problem) -> Tensor<B, 1> {
        let Problem {
            hidden,
            weight,
            targets,
        } = problem;
        let [rows, _] = hidden.dims();
        let full = |hidden: Tensor<B, 2>, targets| {
            let loss = CrossEntropyLossConfig::new().init(&hidden.device());
            loss.forward(hidden.matmul(weight.clone()), targets)
        };
        match self {
            Self::Full => full(hidden.clone(), targets.clone()),
            Self::Chunked(chunk) => LinearCrossEntropyLossConfig::new()
                .with_chunk(chunk)
                .init()
                .forward(hidden.clone(), weight.clone(), None, targets.clone()),
            Self::Scopes(chunk) => {
                let part = |start: usize| {
                    let range = start..rows.min(start + chunk);
                    let share = range.len() as f64 / rows as f64;
                    let hidden = hidden.clone().slice([range.clone()]);
                    let targets = targets.clone().slice([range]);
                    checkpoint(|| full(hidden, targets)).mul_scalar(share)
                };
                let parts = (0..rows).step_by(chunk).map(part);
                parts.reduce(|sum, part| sum + part).expect("rows")
            }
        }
    }

    fn step(self, problem: &Problem) -> Step {
        HEAP.reset_peak_usage();
        let before = HEAP.current_usage();
        let start = Instant::now();
        let loss = self.loss(problem);
        let gradients = loss.backward();
        let milliseconds = 1e3 * start.elapsed().as_secs_f64();
        let peak_bytes = (HEAP.peak_usage() - before) as f64;
        assert!(problem.hidden.grad(&gradients).is_some());
        assert!(problem.weight.grad(&gradients).is_some());
        Step {
            milliseconds,
            peak_bytes,
            loss: loss.into_scalar(),
        }
    }
}

fn problem(rows: usize, width: usize, classes: usize) -> Problem {
    let device = Default::default();
    B::seed(&device, 42);
    let normal = |deviation| Distribution::Normal(0.0, deviation);
    let targets = Tensor::<B, 1>::random([rows], Distribution::Uniform(0.0, 1.0), &device);
    Problem {
        hidden: Tensor::random([rows, width], normal(1.0), &device).require_grad(),
        weight: Tensor::random([width, classes], normal(0.05), &device).require_grad(),
        targets: targets
            .mul_scalar(classes as f64)
            .int()
            .clamp(0, classes as i64 - 1),
    }
}

/// The middle one.
fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<_> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    let option = |name: &str, default: &str| {
        let mut arguments = std::env::args().skip_while(|argument| argument != name);
        arguments.nth(1).unwrap_or_else(|| default.to_owned())
    };
    let number = |text: &str| text.parse::<usize>().expect("a number");
    let rows = number(&option("--rows", "2048"));
    let width = number(&option("--width", "512"));
    let rounds = number(&option("--rounds", "5"));
    let names = option("--settings", "full,chunked,scopes=256");
    let settings: Vec<_> = names
        .split(',')
        .map(|name| (name, Setting::parse(name)))
        .collect();

    println!("rows,width,classes,setting,milliseconds,times_first,peak_mib,percent_of_first,loss");
    for classes in option("--classes", "2000,8000,32000")
        .split(',')
        .map(number)
    {
        let problem = problem(rows, width, classes);
        let round = |_| -> Vec<Step> {
            let step = |(_, setting): &(_, Setting)| setting.step(&problem);
            settings.iter().map(step).collect()
        };
        let rounds: Vec<Vec<Step>> = (0..rounds).map(round).collect();
        for (at, (name, _)) in settings.iter().enumerate() {
            let of =
                |value: &dyn Fn(&[Step]) -> f64| median(rounds.iter().map(|round| value(round)));
            println!(
                "{rows},{width},{classes},{name},{:.0},{:.3},{:.1},{:.2},{}",
                of(&|round| round[at].milliseconds),
                of(&|round| round[at].milliseconds / round[0].milliseconds),
                of(&|round| round[at].peak_bytes) / f64::from(1 << 20),
                100.0 * of(&|round| round[at].peak_bytes / round[0].peak_bytes),
                rounds[0][at].loss,
            );
        }
    }
}
