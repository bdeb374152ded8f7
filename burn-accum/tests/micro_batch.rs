//! A micro-batch for a real model on Flex, measured by an allocator that counts.
//!
//! All of a process's heap is counted, so there is one test: the harness starts threads of its own
//! beside several.

use burn::{
    backend::Autodiff,
    module::Module,
    nn::{
        Linear, LinearConfig,
        loss::{MseLoss, Reduction},
    },
    optim::{AdamWConfig, SgdConfig},
    tensor::{Tensor, TensorData, activation::gelu, backend::AutodiffBackend, backend::Backend},
    train::{ItemLazy, TrainOutput, TrainStep},
};
use burn_accum::{
    AccumConfig, AccumError, Counted, MemoryProbe, MicroBatchFound, MicroBatchSearch,
    Normalization, PeakCounter, TrialOutcome, find_micro_batch, rehearse,
};
use burn_flex::Flex;
use burn_update::Update;
use peak_alloc::PeakAlloc;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

type B = Autodiff<Flex>;

fn probe() -> impl MemoryProbe {
    PeakCounter::new(|| HEAP.reset_peak_usage(), || HEAP.peak_usage() as u64)
}

const FEATURES: usize = 64;
const EFFECTIVE_BATCH: usize = 600;
/// Rows of an item: it takes 17 KiB, where half an item is more than what worker threads allocate
/// once, at a time of their own.
const ITEM_ROWS: usize = 4;

#[derive(Module, Debug)]
struct Mlp<B: Backend> {
    up: Linear<B>,
    down: Linear<B>,
}

impl<B: Backend> Mlp<B> {
    fn new(device: &B::Device) -> Self {
        B::seed(device, 7);
        let model = Self {
            up: LinearConfig::new(FEATURES, 4 * FEATURES).init(device),
            down: LinearConfig::new(4 * FEATURES, 1).init(device),
        };
        // Drawn here and not in each clone.
        model.up.weight.val();
        model.down.weight.val();
        model
    }
}

struct Nothing;

impl ItemLazy for Nothing {
    type ItemSync = Self;

    fn sync(self) -> Self {
        self
    }
}

impl<B: AutodiffBackend> TrainStep for Mlp<B> {
    type Input = Tensor<B, 2>;
    type Output = Nothing;

    fn step(&self, rows: Tensor<B, 2>) -> TrainOutput<Nothing> {
        let [items, _] = rows.dims();
        let targets = rows.clone().mean_dim(1);
        let output = self.down.forward(gelu(self.up.forward(rows)));
        let loss = MseLoss::new().forward(output, targets, Reduction::Mean);
        Counted::mean(loss, items).output(self, Nothing)
    }
}

/// The rows of some items of the effective batch.
fn rows(items: core::ops::Range<usize>) -> Tensor<B, 2> {
    let size = [items.len() * ITEM_ROWS, FEATURES];
    let element = ITEM_ROWS * FEATURES;
    let elements = items.start * element..items.end * element;
    let values = elements.map(|i| ((i % 1013) as f32).sin());
    Tensor::from_data(TensorData::new(values.collect(), size), &Default::default())
}

/// AdamW in windows of two, with a micro-batch of this size.
fn step(micro_batch: usize) {
    in_windows_of(2, micro_batch);
}

fn in_windows_of(micro_batches: usize, micro_batch: usize) {
    let adam = AdamWConfig::new().init::<B, Mlp<B>>();
    let windows = AccumConfig::tokens(micro_batches);
    let update = Update::new(adam).accumulate(windows).unwrap();
    rehearse(Mlp::new(&Default::default()), update, || {
        rows(0..micro_batch)
    });
}

fn find(limit_bytes: u64) -> Result<MicroBatchFound, AccumError> {
    let search = MicroBatchSearch::new(EFFECTIVE_BATCH, limit_bytes)
        .with_normalization(Normalization::Tokens);
    find_micro_batch::<B, _>(&search, &Default::default(), &mut probe(), step)
}

/// A limit in the middle between what a micro-batch of this size takes and what the next does.
fn limit_for(micro_batch: usize) -> u64 {
    let [fits, does_not] = [micro_batch, micro_batch + 1].map(peak_of);
    ((fits + does_not) as f64 / 2.0 / 0.95) as u64
}

/// Small and large matrix products keep a workspace each, for every thread.
fn warm_up() {
    step(2);
    step(EFFECTIVE_BATCH);
}

fn peak_of(micro_batch: usize) -> u64 {
    peak_in_windows_of(2, micro_batch)
}

fn peak_in_windows_of(micro_batches: usize, micro_batch: usize) -> u64 {
    let mut probe = probe();
    probe.begin();
    in_windows_of(micro_batches, micro_batch);
    probe.end()
}

#[test]
fn a_micro_batch_is_found() {
    warm_up();
    a_long_window_is_measured_with_the_state_of_the_optimizer();
    the_largest_that_fits_is_found_twice();
    a_window_of_what_was_found_is_one_batch();
    what_fails_does_not_fit_and_leaves_all_in_order();
    what_cannot_be_found_is_told();
}

fn a_long_window_is_measured_with_the_state_of_the_optimizer() {
    let [short, long] = [2, 8].map(|micro_batches| peak_in_windows_of(micro_batches, 4));
    assert!(short.abs_diff(long) < short / 100, "{short} {long}");
}

fn the_largest_that_fits_is_found_twice() {
    let limit_bytes = limit_for(251);
    let found = find(limit_bytes).unwrap();
    println!("{found}");
    let micro_batch = found.partition.micro_batch();
    assert_eq!(micro_batch, 251, "{found}");
    assert_eq!((found.partition.steps(), found.partition.last()), (3, 98));

    let usable_bytes = found.search.usable_bytes();
    assert!(found.peak_bytes <= usable_bytes);
    assert_eq!(found.predicted_most(), micro_batch);
    assert!(peak_of(micro_batch) <= usable_bytes);
    assert!(peak_of(micro_batch + 1) > usable_bytes);
    // Up to 6 items the update is the peak, which gives the search no slope: one trial more than
    // without.
    assert!(found.trials.len() <= 9, "{found}");

    let again = find(limit_bytes).unwrap();
    assert_eq!(again.partition, found.partition);
}

fn a_window_of_what_was_found_is_one_batch() {
    let found = find(limit_for(230)).unwrap();
    assert!(!found.partition.is_even());
    let device = Default::default();

    let sgd = || Update::new(SgdConfig::new().init());
    let mut windows = sgd().accumulate(found.config().unwrap()).unwrap();
    let mut model = Mlp::<B>::new(&device);
    for range in found.partition.ranges() {
        let output = model.step(rows(range));
        model = windows.step(0.1, model, output.grads).unwrap();
    }
    assert_eq!(windows.updates(), 1);

    let mut whole = sgd().accumulate(AccumConfig::tokens(1)).unwrap();
    let expected = Mlp::<B>::new(&device);
    let output = expected.step(rows(0..EFFECTIVE_BATCH));
    let expected = whole.step(0.1, expected, output.grads).unwrap();

    let start = Mlp::<B>::new(&device).up.weight.val().into_data();
    let [model, expected] = [model, expected].map(|model| model.up.weight.val().into_data());
    assert_ne!(start, expected);
    model.assert_approx_eq::<f32>(&expected, burn::tensor::Tolerance::absolute(1e-6));
}

fn what_fails_does_not_fit_and_leaves_all_in_order() {
    let device = Default::default();
    let model = Mlp::<B>::new(&device);
    let before = model.up.weight.val().into_data();
    let search = MicroBatchSearch::new(EFFECTIVE_BATCH, 1 << 40);

    let panics = |micro_batch: usize| {
        let output = model.step(rows(0..micro_batch));
        assert!(micro_batch <= 40, "out of memory: {micro_batch} rows");
        drop(output);
    };
    let found = find_micro_batch::<B, _>(&search, &device, &mut probe(), panics).unwrap();
    assert_eq!(
        (found.partition.micro_batch(), found.partition.steps()),
        (40, 15)
    );
    let failed = |found: &MicroBatchFound| {
        let mut outcomes = found.trials.iter().map(|trial| trial.outcome.clone());
        outcomes.find_map(|outcome| match outcome {
            TrialOutcome::Failed { reason } => Some(reason),
            _ => None,
        })
    };
    assert!(failed(&found).unwrap().starts_with("out of memory: "));

    let errs = |micro_batch: usize| {
        drop(model.step(rows(0..micro_batch)));
        if micro_batch > 40 {
            Err("no room")
        } else {
            Ok(())
        }
    };
    let found = find_micro_batch::<B, _>(&search, &device, &mut probe(), errs).unwrap();
    assert_eq!(found.partition.micro_batch(), 40);
    assert_eq!(failed(&found).unwrap(), "no room");

    assert_eq!(model.up.weight.val().into_data(), before);
    assert!(find(limit_for(50)).is_ok(), "the process goes on");
}

fn what_cannot_be_found_is_told() {
    let error = find(1 << 20).unwrap_err();
    let AccumError::LimitTooSmall { needed_bytes, .. } = error else {
        panic!("{error}");
    };
    // The heap of a test is not the same to the byte between two searches.
    assert!(matches!(
        find(needed_bytes - needed_bytes / 50),
        Err(AccumError::LimitTooSmall { .. })
    ));
    assert!(find(needed_bytes + needed_bytes / 500).is_ok());

    let search = MicroBatchSearch::new(8, 1 << 30);
    let mut blind = PeakCounter::new(|| (), || 0);
    let error = find_micro_batch::<B, _>(&search, &Default::default(), &mut blind, step);
    assert!(matches!(error, Err(AccumError::NothingMeasured { .. })));

    let fails = |_| panic!("a bug");
    let error = find_micro_batch::<B, ()>(&search, &Default::default(), &mut probe(), fails);
    let reason = "a bug".to_owned();
    assert_eq!(error, Err(AccumError::StepFails { reason }));
}
