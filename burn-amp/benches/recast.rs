//! What casting a weight again at every use costs: a recurrent cell whose weights are used once a
//! time step, cast by autocast every time, the same over `CastCache`, and on weights that the user
//! cast once, whose gradients are then summed in bf16. Forward and backward.
#![allow(missing_docs)] // criterion_group

use std::hint::black_box;

use burn::backend::Autodiff;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{Distribution, FloatDType, Tensor};
use burn_amp::{Autocast, CastCache};
use burn_flex::Flex;
use criterion::measurement::WallTime;
use criterion::{BenchmarkGroup, Criterion, criterion_group, criterion_main};

const TIME: usize = 32;

/// `h = tanh(x w + h u)` over time, on a sequence of ones.
fn recurrent<B: AutodiffBackend>(batch: usize, w: Tensor<B, 2>, u: Tensor<B, 2>) -> Tensor<B, 1> {
    let [width, _] = w.dims();
    let x = Tensor::<B, 2>::ones([batch, width], &w.device()).cast(FloatDType::BF16);
    let mut h = Tensor::<B, 2>::zeros([batch, width], &w.device()).cast(FloatDType::BF16);
    for _ in 0..TIME {
        h = (x.clone().matmul(w.clone()) + h.matmul(u.clone())).tanh();
    }
    h.mean()
}

fn weights<B: AutodiffBackend>(width: usize) -> [Tensor<B, 2>; 2] {
    let device = B::Device::default();
    let weight = || Tensor::random([width, width], Distribution::Normal(0.0, 0.05), &device);
    [weight().require_grad(), weight().require_grad()]
}

fn bench(criterion: &mut Criterion) {
    for (batch, width) in [(4, 128), (32, 128), (128, 256)] {
        let mut group =
            criterion.benchmark_group(format!("recurrent cell, batch {batch}, width {width}"));
        group.sample_size(20);
        step::<Autocast<Autodiff<Flex>>>(&mut group, "cast at every use", batch, width, false);
        step::<Autocast<Autodiff<CastCache<Flex>>>>(&mut group, "cast cache", batch, width, false);
        step::<Autocast<Autodiff<Flex>>>(&mut group, "cast once by the user", batch, width, true);
    }
}

fn step<B: AutodiffBackend>(
    group: &mut BenchmarkGroup<'_, WallTime>,
    name: &str,
    batch: usize,
    width: usize,
    cast_once: bool,
) {
    let weights = weights::<B>(width);
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            // A weight is new in every step of a training, so nothing is remembered from the last.
            let [w, u] = weights.each_ref().map(|w| w.clone().mul_scalar(1.0));
            let [w, u] = match cast_once {
                true => [w.cast(FloatDType::BF16), u.cast(FloatDType::BF16)],
                false => [w, u],
            };
            black_box(recurrent::<B>(batch, w, u).backward())
        });
    });
}

criterion_group!(benches, bench);
criterion_main!(benches);
