//! What the decorator costs an operation: the bare backend and the decorator side by side, on
//! tensors so small that nothing else is measured.
#![allow(missing_docs)] // criterion_group
use std::hint::black_box;

use burn::backend::Autodiff;
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_amp::{Autocast, Bf16, Configured, Off};
use burn_flex::Flex;
use criterion::{Criterion, criterion_group, criterion_main};

/// Operations of each class that bring no work of their own: under every policy here nothing is
/// cast.
fn operations<B: Backend>(name: &str, criterion: &mut Criterion) {
    let x = Tensor::<B, 1>::ones([1], &B::Device::default());
    let mut group = |op: &str, f: &dyn Fn(Tensor<B, 1>) -> Tensor<B, 1>| {
        criterion
            .benchmark_group(op)
            .bench_function(name, |bencher| {
                bencher.iter(|| black_box(f(black_box(x.clone()))));
            });
    };
    group("keep: neg", &|x| x.neg());
    group("promote: add", &|x| x.clone() + x);
    group("full: exp", &|x| x.exp());
}

fn inference(criterion: &mut Criterion) {
    operations::<Flex>("bare", criterion);
    operations::<Autocast<Flex, Off>>("off", criterion);
    operations::<Autocast<Flex, Bf16>>("bf16", criterion);
    operations::<Autocast<Flex, Configured>>("configured", criterion);
}

fn training(criterion: &mut Criterion) {
    operations::<Autodiff<Flex>>("autodiff, bare", criterion);
    operations::<Autocast<Autodiff<Flex>, Off>>("autodiff, off", criterion);
    operations::<Autocast<Autodiff<Flex>, Bf16>>("autodiff, bf16", criterion);
}

criterion_group!(benches, inference, training);
criterion_main!(benches);
