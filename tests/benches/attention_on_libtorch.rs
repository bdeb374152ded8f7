//! Time of attention with its backward pass on LibTorch, by the length of the sequence: in blocks
//! of queries, and composed by Burn's `Autodiff`.
//!
//!     cargo bench --workspace --features tests/tch --bench attention_on_libtorch [-- --tokens 256,2048 --rounds 7]
//!
//! f32, the sizes of burn-fused's bench `attention`, whose `torch_attention.py` is PyTorch's own
//! `scaled_dot_product_attention`. In every round each setting takes one step; ratios are taken
//! within a round. docs/libtorch.md has the environment.

use std::time::Instant;

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Distribution, Tensor};
use burn_decorator::tch::Mended;
use burn_fused::FusedBackward;
use burn_tch::LibTorch;

type Plain = Autodiff<Mended<LibTorch>>;
type Fused = FusedBackward<Plain>;

const HEADS: usize = 4;
const WIDTH: usize = 64;

/// Takes a step when it is called, and says its milliseconds.
type Racer = Box<dyn Fn() -> f64>;

fn racer<B: AutodiffBackend>(tokens: usize, is_causal: bool) -> Racer {
    let device = B::Device::default();
    let shape = [1, HEADS, tokens, WIDTH];
    let random = || Tensor::<B, 4>::random(shape, Distribution::Normal(0.0, 1.0), &device);
    let operands = [(); 3].map(|()| random().require_grad());
    let weight = random();
    let options = AttentionModuleOptions {
        is_causal,
        ..Default::default()
    };
    let step = move || {
        let start = Instant::now();
        let [query, key, value] = operands.clone();
        let result = attention(query, key, value, None, None, options);
        let gradients = (result * weight.clone()).sum().backward();
        assert!(operands[0].grad(&gradients).is_some());
        1e3 * start.elapsed().as_secs_f64()
    };
    step();
    Box::new(step)
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
    let rounds: usize = option("--rounds", "7").parse().expect("a number");
    println!("tokens,causal,setting,milliseconds,times_first");
    for tokens in option("--tokens", "128,256,512,1024,2048").split(',') {
        let tokens = tokens.parse().expect("a number");
        for is_causal in [false, true] {
            let racers = [
                ("autodiff", racer::<Plain>(tokens, is_causal)),
                ("blocks", racer::<Fused>(tokens, is_causal)),
            ];
            let round = |_| racers.each_ref().map(|(_, step)| step());
            let rounds: Vec<_> = (0..rounds).map(round).collect();
            for (at, (name, _)) in racers.iter().enumerate() {
                let milliseconds = median(rounds.iter().map(|round| round[at]));
                let ratio = median(rounds.iter().map(|round| round[at] / round[0]));
                println!("{tokens},{is_causal},{name},{milliseconds:.1},{ratio:.3}");
            }
        }
    }
}
