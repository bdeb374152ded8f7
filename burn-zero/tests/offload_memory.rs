//! Training a model whose Adam state does not fit the device, counted by the allocator: alone in
//! its process.
//!
//! The device is the heap: Flex's tensors are there. The host is what lies outside of it: state of
//! the host optimizer is in mappings of its own. Buffers of transfers are of the host too but are
//! counted as if they were the device's.

#[path = "support/layers.rs"]
mod layers;

use std::sync::{Mutex, MutexGuard};

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::{BinBytesRecorder, FullPrecisionSettings, Recorder};
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig, OffloadedAdamW};
use layers::{Layers, layers};
use peak_alloc::PeakAlloc;

type B = Autodiff<Flex>;
type Model = Layers<B>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const LAYERS: usize = 32;
const WIDTH: usize = 128;
const PARAMETER_BYTES: usize = LAYERS * WIDTH * WIDTH * 4;
/// Of the device: parameters, gradients and half of the moments.
const LIMIT_BYTES: usize = 3 * PARAMETER_BYTES;
const STEPS: usize = 4;

/// Tests of one process count the same bytes.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// The most bytes that training takes, and the trained weights.
fn train(mut optimizer: impl Optimizer<Model, B>) -> (usize, Vec<f32>) {
    let device = Default::default();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let mut model = layers(LAYERS, WIDTH, 0.2);
    for _ in 0..STEPS {
        let x = Tensor::<B, 2>::ones([1, WIDTH], &device);
        let gradients = layers::loss(&model, x).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let peak = HEAP.peak_usage() - before;
    // The optimizer goes with its state.
    drop(optimizer);
    (peak, layers::weights(&model))
}

#[test]
fn a_model_whose_state_does_not_fit_is_trained_from_the_host() {
    let _turn = turn();
    let adamw = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 1e-4,
        ..Default::default()
    };
    let (plain, expected) = train(AdamWConfig::new().init());
    let (offloaded, weights) = train(OffloadConfig::new(adamw).init().unwrap());
    println!("{PARAMETER_BYTES} bytes of parameters: {plain} on the device, {offloaded} offloaded");
    assert!(plain > LIMIT_BYTES, "{plain} of {LIMIT_BYTES}");
    assert!(offloaded < LIMIT_BYTES, "{offloaded} of {LIMIT_BYTES}");
    // Parameters and gradients, and a few on their way.
    assert!(offloaded < PARAMETER_BYTES * 5 / 2, "{offloaded}");
    let pairs = expected.iter().zip(&weights);
    let most = pairs.fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
    assert!(most < 4e-6, "{most}");
}

/// What Burn's Learner does with the record of an optimizer: it loads it into a clone, and ranks
/// and strategies clone what it has.
#[test]
fn resuming_holds_the_saved_state_once() {
    let _turn = turn();
    let new = || OffloadConfig::default().init().unwrap();
    let step = |optimizer: &mut OffloadedAdamW, model: Model| {
        let x = Tensor::<B, 2>::ones([1, WIDTH], &Default::default());
        let gradients = layers::loss(&model, x).backward();
        let gradients = GradientsParams::from_grads(gradients, &model);
        optimizer.step(0.01, model, gradients)
    };
    let mut optimizer = new();
    let model = step(&mut optimizer, layers(LAYERS, WIDTH, 0.2));
    let recorder = BinBytesRecorder::<FullPrecisionSettings>::default();
    let record = Optimizer::<Model, B>::to_record(&optimizer);
    let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
    let expected = layers::weights(&step(&mut optimizer, model.clone()));
    drop(optimizer);
    // Both moments.
    let state_bytes = 2 * PARAMETER_BYTES;

    let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let fresh = new();
    let resumed = Optimizer::<Model, B>::load_record(fresh.clone(), record);
    let clones: Vec<_> = (0..4).map(|_| resumed.clone()).collect();
    let record = Optimizer::<Model, B>::to_record(&resumed);
    let again = Optimizer::<Model, B>::load_record(fresh, record.clone());
    let loaded = HEAP.peak_usage() - before;
    drop((clones, record));
    HEAP.reset_peak_usage();
    let mut used = resumed.clone();
    let weights = layers::weights(&step(&mut used, model));
    let stepped = HEAP.peak_usage() - before;
    drop((again, resumed));
    println!("{state_bytes} bytes of state: {loaded} more to load it, {stepped} for a step");
    assert!(loaded < state_bytes / 16, "{loaded} of {state_bytes}");
    // Gradients, and parameters on their way.
    assert!(stepped < 3 * PARAMETER_BYTES, "{stepped}");
    assert_eq!(weights, expected);
}
