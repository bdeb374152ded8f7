//! The loss over a vocabulary takes a small part of its logits' bytes.

use burn::backend::Autodiff;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_checkpoint::{Chunk, LinearCrossEntropyLossConfig, Remat};
use examples::pools::memory_probe;

use super::{counters, in_use, turn};

/// 16 rows for each column, as 8,192 rows of 512 are.
const ROWS: usize = 1024;
const WIDTH: usize = 64;
const CLASSES: usize = 16_000;

/// The most bytes in use in a forward and backward pass, beyond what was in use before.
fn peak<B: AutodiffBackend>(
    loss: impl Fn(Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 1, Int>) -> Tensor<B, 1>,
) -> u64 {
    let counters = counters::<B>();
    let device = B::Device::default();
    let hidden = Tensor::<B, 2>::ones([ROWS, WIDTH], &device).require_grad();
    let weight = Tensor::<B, 2>::ones([WIDTH, CLASSES], &device).require_grad();
    let targets = Tensor::<B, 1, Int>::arange(0..ROWS as i64, &device);
    let step = || {
        let gradients = loss(hidden.clone(), weight.clone(), targets.clone()).backward();
        assert!(weight.grad(&gradients).is_some());
        in_use::<B>(counters);
    };
    // Kernels are chosen.
    step();
    let mut probe = memory_probe(counters);
    let before = in_use::<B>(counters);
    probe.begin();
    step();
    probe.end().saturating_sub(before)
}

fn chunks_take_a_small_part_of_the_logits<I: Backend>() {
    let _turn = turn();
    let full = peak::<Autodiff<Remat<I>>>(|hidden, weight, targets| {
        let loss = CrossEntropyLossConfig::new().init(&hidden.device());
        loss.forward(hidden.matmul(weight), targets)
    });
    let config = LinearCrossEntropyLossConfig::new().with_chunk(Chunk::Rows(WIDTH / 2));
    let chunked = peak::<Autodiff<Remat<I>>>(|hidden, weight, targets| {
        config.init().forward(hidden, weight, None, targets)
    });
    let logits = (4 * ROWS * CLASSES) as f64;
    let name = I::name(&I::Device::default());
    println!("{name}: {chunked} of {full} bytes, logits {logits}");
    // On Flex three times, counted; on a device what samples find.
    assert!(full as f64 > 0.95 * logits, "{full}");
    // Twice the weight is 12.5 %.
    assert!((chunked as f64) < 0.16 * logits, "{chunked}");
}

tests::on_counted_backends!(chunks_take_a_small_part_of_the_logits);
