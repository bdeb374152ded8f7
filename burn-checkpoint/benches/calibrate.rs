//! What an element costs, by work class: the constants of `src/budget/cost.rs`.
//!
//!     cargo bench -p burn-checkpoint --bench calibrate
//!
//! prints nanoseconds an element (for products a multiplication) of operations on a million elements, the fastest of some
//! repetitions, which a busy machine disturbs least; then, for each class, the median of its operations. Only ratios matter.

use std::hint::black_box;
use std::time::Instant;

use burn::nn::LayerNormConfig;
use burn::tensor::{Bool, Distribution, Int, Tensor, activation, module};
use burn_flex::Flex;

type T = Tensor<Flex, 2>;

const SIDE: usize = 1024;
const REPETITIONS: usize = 25;

/// What was measured: class, operation, nanoseconds.
struct Costs(Vec<(&'static str, f64)>);

impl Costs {
    fn of<R>(&mut self, class: &'static str, name: &str, work: f64, run: impl Fn() -> R) {
        let once = || {
            let start = Instant::now();
            let result = black_box(run());
            let time = start.elapsed().as_nanos() as f64;
            drop(result);
            time
        };
        let fastest = (0..REPETITIONS).map(|_| once()).fold(f64::MAX, f64::min);
        println!("{class:8} {name:18} {:8.3} ns", fastest / work);
        self.0.push((class, fastest / work));
    }

    /// The middle operation of each class, in the order in which the classes came.
    fn medians(&self) -> Vec<(&'static str, f64)> {
        let mut classes: Vec<_> = self.0.iter().map(|(class, _)| *class).collect();
        classes.dedup();
        let median = |class| {
            let own = self.0.iter().filter(|(other, _)| *other == class);
            let mut own: Vec<f64> = own.map(|(_, ns)| *ns).collect();
            own.sort_by(f64::total_cmp);
            (class, own[own.len() / 2])
        };
        classes.into_iter().map(median).collect()
    }
}

fn main() {
    let device = Default::default();
    let x = T::random([SIDE, SIDE], Distribution::Uniform(0.1, 0.9), &device);
    let elements = (SIDE * SIDE) as f64;
    let mut costs = Costs(Vec::new());

    let products = elements * SIDE as f64;
    costs.of("compute", "matmul", products, || {
        x.clone().matmul(x.clone())
    });
    // As in attention: 64 heads of 64 features that read 256 tokens.
    let heads = x.clone().reshape([64, 256, 64]);
    let (keys, reads) = (heads.clone().swap_dims(1, 2), (64 * 256 * 256 * 64) as f64);
    costs.of("compute", "matmul of a batch", reads, || {
        heads.clone().matmul(keys.clone())
    });
    let image = x.clone().reshape([4, 64, 64, 64]);
    let kernel = Tensor::<Flex, 4>::ones([64, 64, 3, 3], &device);
    costs.of("compute", "conv2d", elements * 64.0 * 9.0, || {
        let options = burn::tensor::ops::ConvOptions::new([1, 1], [1, 1], [1, 1], 1);
        module::conv2d(image.clone(), kernel.clone(), None, options)
    });

    costs.of("sort", "sort", elements, || x.clone().sort(1));
    costs.of("sort", "argsort", elements, || x.clone().argsort(1));

    let norm = LayerNormConfig::new(SIDE).init::<Flex>(&device);
    costs.of("norm", "softmax", elements, || {
        activation::softmax(x.clone(), 1)
    });
    costs.of("norm", "log_softmax", elements, || {
        activation::log_softmax(x.clone(), 1)
    });
    costs.of("norm", "layer_norm", elements, || norm.forward(x.clone()));

    costs.of("math", "gelu", elements, || activation::gelu(x.clone()));
    costs.of("math", "sigmoid", elements, || {
        activation::sigmoid(x.clone())
    });
    costs.of("math", "exp", elements, || x.clone().exp());
    costs.of("math", "log", elements, || x.clone().log());
    costs.of("math", "tanh", elements, || x.clone().tanh());
    costs.of("math", "erf", elements, || x.clone().erf());
    costs.of("math", "powf", elements, || x.clone().powf_scalar(1.7));

    costs.of("reduce", "sum", elements, || x.clone().sum());
    costs.of("reduce", "sum_dim 1", elements, || x.clone().sum_dim(1));
    costs.of("reduce", "mean_dim 0", elements, || x.clone().mean_dim(0));
    costs.of("reduce", "max_dim", elements, || x.clone().max_dim(1));
    costs.of("reduce", "cumsum", elements, || x.clone().cumsum(1));

    let rows = Tensor::<Flex, 1, Int>::arange(0..SIDE as i64, &device);
    let columns = rows.clone().unsqueeze::<2>().repeat_dim(0, SIDE);
    costs.of("index", "select", elements, || {
        x.clone().select(0, rows.clone())
    });
    costs.of("index", "gather", elements, || {
        x.clone().gather(1, columns.clone())
    });
    let later = Tensor::<Flex, 2, Bool>::tril_mask([SIDE, SIDE], 0, &device);
    costs.of("cheap", "mask_fill", elements, || {
        x.clone().mask_fill(later.clone(), f32::NEG_INFINITY)
    });
    costs.of("cheap", "add", elements, || x.clone() + x.clone());
    costs.of("cheap", "mul", elements, || x.clone() * x.clone());
    costs.of("cheap", "sqrt", elements, || x.clone().sqrt());
    costs.of("cheap", "add_scalar", elements, || x.clone() + 1.0);
    let row = x.clone().narrow(0, 0, 1);
    costs.of("cheap", "add a row", elements, || x.clone() + row.clone());
    costs.of("cheap", "greater", elements, || x.clone().greater_elem(0.5));
    costs.of("cheap", "cat", elements, || {
        let halves = x.clone().chunk(2, 0);
        Tensor::cat(halves, 0)
    });
    costs.of("cheap", "copy of a transpose", elements, || {
        x.clone().transpose().reshape([SIDE * 2, SIDE / 2])
    });

    println!();
    for (class, ns) in costs.medians() {
        println!("{class:8} {ns:8.3} ns");
    }
}
