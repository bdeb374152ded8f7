//! What recording costs: 1,000 times a few tiny operations, for `valgrind --tool=callgrind` to
//! count instructions of.
//!
//! ```text
//! cargo build --release --workspace --example overhead
//! valgrind --tool=callgrind target/release/examples/overhead plain|bare|scope|budget [repetitions]
//! ```
//!
//! The difference between two numbers of repetitions is what the operations cost.

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_checkpoint::{MemoryBudget, Remat, checkpoint};
use burn_flex::Flex;

/// Five operations.
fn step<B: AutodiffBackend>(x: &Tensor<B, 2>) -> Tensor<B, 2> {
    let y = x.clone().matmul(x.clone());
    let y = (y + x.clone()).mul_scalar(0.1);
    y.tanh() - x.clone()
}

fn train<B: AutodiffBackend>(repetitions: usize, scoped: bool) {
    let x = Tensor::<B, 2>::ones([8, 8], &Default::default()).require_grad();
    for _ in 0..repetitions {
        drop(if scoped {
            checkpoint(|| step(&x))
        } else {
            step(&x)
        });
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let mode = arguments.next().unwrap_or_else(|| "plain".to_owned());
    let repetitions = arguments
        .next()
        .map_or(1000, |x| x.parse().expect("a number"));
    match mode.as_str() {
        "plain" => train::<Autodiff<Flex>>(repetitions, false),
        "bare" => train::<Autodiff<Remat<Flex>>>(repetitions, false),
        "scope" => train::<Autodiff<Remat<Flex>>>(repetitions, true),
        "budget" => {
            let _budget = MemoryBudget::bytes(1 << 40).install();
            train::<Autodiff<Remat<Flex>>>(repetitions, false);
        }
        other => panic!("no mode {other}"),
    }
}
