//! Training a model whose Adam state does not fit the device, counted by the allocator: alone in its process.
//!
//! The device is the heap: Flex's tensors are there. The host is what lies outside of it: state of the host optimizer is in
//! mappings of its own. Buffers of transfers are of the host too but are counted as if they were the device's.

#[path = "support/layers.rs"]
mod layers;

use burn::backend::Autodiff;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig};
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
    let adamw = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 1e-4,
        ..Default::default()
    };
    let offload = |ratio| OffloadConfig {
        ratio,
        ..OffloadConfig::new(adamw.clone())
    };
    let (plain, expected) = train(AdamWConfig::new().init());
    let (offloaded, weights) = train(offload(1.0).init::<B>().unwrap());
    let (half, weights_of_half) = train(offload(0.5).init::<B>().unwrap());
    println!(
        "{PARAMETER_BYTES} bytes of parameters: {plain} on the device, {half} half of it, {offloaded} offloaded"
    );
    assert!(plain > LIMIT_BYTES, "{plain} of {LIMIT_BYTES}");
    assert!(offloaded < LIMIT_BYTES, "{offloaded} of {LIMIT_BYTES}");
    // Parameters and gradients, and a few on their way.
    assert!(offloaded < PARAMETER_BYTES * 5 / 2, "{offloaded}");
    assert!(offloaded < half && half < plain, "{half}");
    for found in [weights, weights_of_half] {
        let pairs = expected.iter().zip(&found);
        let most = pairs.fold(0.0_f32, |most, (a, b)| most.max((a - b).abs()));
        assert!(most < 4e-6, "{most}");
    }
}
