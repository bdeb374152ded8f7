//! The loss over a vocabulary takes a small part of its logits' bytes.

use burn::backend::Autodiff;
use burn::nn::loss::CrossEntropyLossConfig;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Int, Tensor};
use burn_checkpoint::Remat;
use burn_fused::{Chunk, LinearCrossEntropyLossConfig};
use examples::backend::BackendName;

use super::{counters, idle, in_use, most_in_use, turn};

/// Rows and columns of the hidden states, and columns of the logits: 16 rows for each column, as
/// 8,192 rows of 512 are. On the heap of Flex are the tape's nodes too, which must be a small part;
/// software Vulkan computes slowly.
fn sizes<B: Backend>() -> [usize; 3] {
    match counters::<B>() {
        BackendName::Flex => [1024, 64, 16_000],
        _ => [256, 16, 4000],
    }
}

/// The most bytes in use in a forward and backward pass, beyond what was in use before.
fn peak<B: AutodiffBackend>(
    loss: impl Fn(Tensor<B, 2>, Tensor<B, 2>, Tensor<B, 1, Int>) -> Tensor<B, 1> + Send + Sync,
) -> u64 {
    let counters = counters::<B>();
    let device = B::Device::default();
    let [rows, width, classes] = sizes::<B>();
    let hidden = Tensor::<B, 2>::ones([rows, width], &device).require_grad();
    let weight = Tensor::<B, 2>::ones([width, classes], &device).require_grad();
    let targets = Tensor::<B, 1, Int>::arange(0..rows as i64, &device);
    let step = || {
        let gradients = loss(hidden.clone(), weight.clone(), targets.clone()).backward();
        assert!(weight.grad(&gradients).is_some());
        in_use::<B>(counters);
    };
    // Kernels are chosen in the first step.
    step();
    let before = idle::<B>(counters);
    most_in_use(counters, step) - before
}

fn chunks_take_a_small_part_of_the_logits<I: Backend>() {
    let _turn = turn();
    let full = peak::<Autodiff<Remat<I>>>(|hidden, weight, targets| {
        let loss = CrossEntropyLossConfig::new().init(&hidden.device());
        loss.forward(hidden.matmul(weight), targets)
    });
    let [rows, width, classes] = sizes::<I>();
    let config = LinearCrossEntropyLossConfig::new().with_chunk(Chunk::Rows(width / 4));
    let chunked = peak::<Autodiff<Remat<I>>>(|hidden, weight, targets| {
        config.init().forward(hidden, weight, None, targets)
    });
    let logits = (4 * rows * classes) as f64;
    let name = I::name(&I::Device::default());
    println!("{name}: {chunked} of {full} bytes, logits {logits}");
    // The logits and two tensors of their size in backward.
    assert!(full as f64 > 2.9 * logits, "{full}");
    // The weight's gradient, twice a quarter of it for the logits of a chunk and an eighth for a
    // part are 3.4 %. On the heap there are the tape's nodes too: 43 kB a chunk. A device counts
    // the pages of each size at their most, at whatever time that was.
    let part = match counters::<I>() {
        BackendName::Flex => 0.05,
        _ => 0.04,
    };
    assert!((chunked as f64) < part * full as f64, "{chunked} of {full}");
}

tests::on_counted_backends!(chunks_take_a_small_part_of_the_logits);
