//! What an element costs, by work class: the constants of `src/budget/cost.rs`.
//!
//! `cargo bench -p burn-checkpoint --bench calibrate` prints nanoseconds an element of operations on a million elements. Only the
//! ratios of these matter.

use std::hint::black_box;
use std::time::Instant;

use burn::nn::LayerNormConfig;
use burn::tensor::{Distribution, Tensor, activation};
use burn_flex::Flex;

type T = Tensor<Flex, 2>;

const SIDE: usize = 1024;

fn main() {
    let device = Default::default();
    let x = T::random([SIDE, SIDE], Distribution::Uniform(0.1, 0.9), &device);
    let indices = Tensor::<Flex, 1, burn::tensor::Int>::arange(0..SIDE as i64, &device);
    let elements = (SIDE * SIDE) as f64;
    let report = |class: &str, name: &str, work: f64, run: &dyn Fn() -> T| {
        let mut times: Vec<f64> = (0..9)
            .map(|_| {
                let start = Instant::now();
                black_box(run());
                start.elapsed().as_nanos() as f64
            })
            .collect();
        times.sort_by(f64::total_cmp);
        println!(
            "{class:8} {name:12} {:.3} ns",
            times[times.len() / 2] / work
        );
    };
    let products = elements * SIDE as f64;
    report("compute", "matmul", products, &|| {
        x.clone().matmul(x.clone())
    });
    report("sort", "sort", elements, &|| x.clone().sort(1));
    report("norm", "softmax", elements, &|| {
        activation::softmax(x.clone(), 1)
    });
    let norm = LayerNormConfig::new(SIDE).init::<Flex>(&device);
    report("norm", "layer_norm", elements, &|| norm.forward(x.clone()));
    report("math", "gelu", elements, &|| activation::gelu(x.clone()));
    report("math", "exp", elements, &|| x.clone().exp());
    report("math", "tanh", elements, &|| x.clone().tanh());
    report("reduce", "sum_dim", elements, &|| x.clone().sum_dim(1));
    report("reduce", "mean_dim", elements, &|| x.clone().mean_dim(0));
    report("index", "select", elements, &|| {
        x.clone().select(0, indices.clone())
    });
    report("cheap", "add", elements, &|| x.clone() + x.clone());
    report("cheap", "add_scalar", elements, &|| x.clone() + 1.0);
    report("cheap", "copy", elements, &|| {
        x.clone().transpose().reshape([SIDE * 2, SIDE / 2])
    });
}
