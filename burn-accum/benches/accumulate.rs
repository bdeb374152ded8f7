//! A micro-step within a window over 16.8 million parameters, beside Burn's own
//! `GradientsAccumulator` and beside what memory allows, on one thread and on all: throughput
//! counts the bytes that have to be moved, 4 to read a gradient and 8 to read and write its sum.
//! Looking for non-finite gradients (`Drop`) reads the gradients once more.
//!
//! glibc gives the freed gradients at the top of the heap back to the system inside of the timed
//! region, depending on where they lie: compare with
//! `MALLOC_TRIM_THRESHOLD_=100000000000 MALLOC_MMAP_THRESHOLD_=100000000000`.
#![allow(missing_docs)] // criterion_group

use std::{
    hint::black_box,
    thread::{available_parallelism, scope},
};

use burn::{
    backend::Autodiff,
    module::{Module, ModuleVisitor, Param},
    nn::{Linear, LinearConfig},
    optim::{GradientsAccumulator, GradientsParams, SgdConfig},
    tensor::{Distribution, Tensor},
};
use burn_accum::{AccumConfig, Accumulation, NonFinite};
use burn_flex::Flex;
use burn_update::Update;
use criterion::{
    BatchSize, BenchmarkGroup, Criterion, Throughput, criterion_group, criterion_main,
    measurement::WallTime,
};

type B = Autodiff<Flex>;
type Layers = Vec<Linear<B>>;

const LAYERS: usize = 16;
const WIDTH: usize = 1024;

struct Filler(GradientsParams);

impl ModuleVisitor<B> for Filler {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let device = Default::default();
        let gradient =
            Tensor::<Flex, D>::random(param.val().shape(), Distribution::Default, &device);
        self.0.register(param.id, gradient);
    }
}

fn gradients(model: &Layers) -> GradientsParams {
    let mut filler = Filler(GradientsParams::new());
    model.visit(&mut filler);
    filler.0
}

fn measure(
    group: &mut BenchmarkGroup<WallTime>,
    name: &str,
    model: &Layers,
    mut accumulate: impl FnMut(GradientsParams),
) {
    group.bench_function(name, |bencher| {
        bencher.iter_batched(
            || gradients(model),
            &mut accumulate,
            BatchSize::PerIteration,
        );
    });
}

/// What memory allows: no allocation, nothing but the bytes.
fn add(sums: &mut [f32], terms: &[f32], threads: usize) {
    let part = sums.len().div_ceil(threads);
    scope(|scope| {
        for (sums, terms) in sums.chunks_mut(part).zip(terms.chunks(part)) {
            scope.spawn(move || {
                for (sum, term) in sums.iter_mut().zip(terms) {
                    *sum += term;
                }
            });
        }
    });
}

fn micro_step(criterion: &mut Criterion) {
    let device = Default::default();
    let layer = || {
        LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device)
    };
    let model: Layers = (0..LAYERS).map(|_| layer()).collect();
    let elements = LAYERS * WIDTH * WIDTH;

    let mut group = criterion.benchmark_group("accumulate");
    group.throughput(Throughput::Bytes(12 * elements as u64));

    let mut sums = vec![1.0_f32; elements];
    let terms = vec![2.0_f32; elements];
    for threads in [1, available_parallelism().map_or(1, Into::into)] {
        group.bench_function(format!("plain slices, {threads} threads"), |bencher| {
            bencher.iter(|| add(&mut sums, black_box(&terms), threads));
        });
    }

    let mut burns = GradientsAccumulator::new();
    measure(
        &mut group,
        "Burn's GradientsAccumulator",
        &model,
        |gradients| {
            burns.accumulate(&model, gradients);
        },
    );
    for non_finite in [NonFinite::Propagate, NonFinite::Drop] {
        let sgd = SgdConfig::new().init::<B, Layers>();
        let windows = Accumulation::new(AccumConfig::mean(usize::MAX));
        let windows = windows.expect("a window that never ends");
        let windows = windows.with_non_finite(non_finite);
        let mut update = Update::new(sgd).accumulate(windows).expect("one window");
        let mut current = Some(model.clone());
        let name = format!("Accumulation, {non_finite:?}");
        measure(&mut group, &name, &model, |gradients| {
            let before = current.take().expect("a model between steps");
            current = Some(update.step(1e-3, before, gradients).expect("a step"));
        });
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().sample_size(20);
    targets = micro_step
}
criterion_main!(benches);
