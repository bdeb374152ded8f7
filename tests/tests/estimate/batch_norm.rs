//! What a batch norm keeps for backward, under autocast and in a scope: the figures of
//! docs/mixed-precision.md.

use burn::backend::Autodiff;
use burn::nn::conv::Conv2dConfig;
use burn::nn::{BatchNormConfig, Relu};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, F16, Off};
use burn_checkpoint::{Remat, checkpoint};
use burn_flex::Flex;

use super::{HEAP, turn};

/// The bytes that conv, norm and ReLU leave on the heap for each element of the activation.
fn kept<B: AutodiffBackend>(in_scope: bool) -> f64 {
    const SHAPE: [usize; 4] = [16, 8, 32, 32];
    let device = B::Device::default();
    let conv = Conv2dConfig::new([8, 8], [1, 1]).init::<B>(&device);
    let norm = BatchNormConfig::new(8).init::<B>(&device);
    let block = |x: Tensor<B, 4>| {
        let x = conv.forward(x);
        let rest = || Relu::new().forward(norm.forward(x));
        match in_scope {
            true => checkpoint(rest),
            false => rest(),
        }
    };
    let ones = || Tensor::<B, 4>::ones(SHAPE, &device);
    let first = block(ones()); // initialises the parameters
    drop(first.sum().backward());
    // A worker thread that had no part in the first takes memory of its own in the next: so the
    // least of several.
    let kept = (0..5).map(|_| {
        let x = ones();
        let before = HEAP.current_usage();
        let y = block(x);
        let after = HEAP.current_usage();
        drop(y.sum().backward());
        after - before
    });
    kept.min().unwrap_or(0) as f64 / SHAPE.iter().product::<usize>() as f64
}

#[test]
fn bytes_an_element() {
    type B<P> = Autocast<Autodiff<Remat<Flex>>, P>;
    let _turn = turn();
    let all = [
        kept::<B<Off>>(false),
        kept::<B<F16>>(false),
        kept::<B<Off>>(true),
        kept::<B<F16>>(true),
    ];
    assert_eq!(all.map(f64::round), [20.0, 18.0, 8.0, 4.0]);
}
