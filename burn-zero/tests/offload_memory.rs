//! Training a model whose Adam state does not fit the device, counted by the allocator: alone in its process.
//!
//! The device is the heap: Flex's tensors are there. The host is what lies outside of it: state of the host optimizer is in
//! mappings of its own. Buffers of transfers are of the host too but are counted as if they were the device's.

use burn::backend::Autodiff;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig};
use peak_alloc::PeakAlloc;

type B = Autodiff<Flex>;
type Model = Vec<Linear<B>>;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

const LAYERS: usize = 32;
const WIDTH: usize = 128;
const PARAMETER_BYTES: usize = LAYERS * WIDTH * WIDTH * 4;
/// Of the device: parameters, gradients and half of the moments.
const LIMIT_BYTES: usize = 3 * PARAMETER_BYTES;
const STEPS: usize = 4;

fn model() -> Model {
    let device = Default::default();
    let layers = (0..LAYERS).map(|layer| {
        let weight = |index: usize| ((index * 37 + layer * 11) % 101) as f32 / 101.0 - 0.5;
        let weights: Vec<_> = (0..WIDTH * WIDTH).map(weight).collect();
        let weights = Tensor::<B, 1>::from_data(weights.as_slice(), &device);
        let mut linear = LinearConfig::new(WIDTH, WIDTH)
            .with_bias(false)
            .init(&device);
        linear.weight = Param::from_tensor(weights.reshape([WIDTH, WIDTH]) * 0.2);
        linear
    });
    layers.collect()
}

/// The most bytes that training takes, and the trained weights.
fn train(mut optimizer: impl Optimizer<Model, B>) -> (usize, Vec<f32>) {
    let device = Default::default();
    let before = HEAP.current_usage();
    HEAP.reset_peak_usage();
    let mut model = model();
    for _ in 0..STEPS {
        let x = Tensor::<B, 2>::ones([1, WIDTH], &device);
        let y = model.iter().fold(x, |x, layer| layer.forward(x).tanh());
        let gradients = GradientsParams::from_grads(y.sum().backward(), &model);
        model = optimizer.step(0.01, model, gradients);
    }
    let peak = HEAP.peak_usage() - before;
    // The optimizer goes with its state.
    drop(optimizer);
    let weights = model
        .iter()
        .flat_map(|layer| layer.weight.val().into_data().into_vec().unwrap());
    (peak, weights.collect())
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
