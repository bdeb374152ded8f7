//! The numbers are PyTorch's, and Burn's AdamW's to rounding.

use burn::module::{Module, Param};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig};
use half::bf16;

use super::golden;
use super::support::*;

#[derive(Module, Debug)]
struct One<B: Backend> {
    weight: Param<Tensor<B, 1>>,
}

#[test]
fn numbers_are_those_of_pytorch() {
    let device = Default::default();
    for case in golden::cases() {
        let adamw = HostAdamWConfig {
            beta_1: case.beta1,
            beta_2: case.beta2,
            epsilon: case.eps,
            weight_decay: case.weight_decay,
        };
        let mut optimizer = OffloadConfig::new(adamw).init().unwrap();
        let weight = Tensor::<B, 1>::from_data(case.initial.as_slice(), &device);
        let mut model = One {
            weight: Param::from_tensor(weight),
        };
        for (gradient, expected) in case.grads.iter().zip(&case.params_after_step) {
            let mut gradients = GradientsParams::new();
            let gradient = Tensor::<Flex, 1>::from_data(gradient.as_slice(), &device);
            gradients.register(model.weight.id, gradient);
            model = optimizer.step(case.lr, model, gradients);
            for (actual, expected) in parameters(&model)[0].iter().zip(expected) {
                // A few roundings of f32 a step, of values around 1.
                let tolerance = 4.0 * f32::EPSILON * expected.abs().max(0.25);
                assert!((actual - expected).abs() <= tolerance);
            }
        }
    }
}

/// The largest difference over f32 parameters.
fn distance(a: &[Vec<f32>], b: &[Vec<f32>]) -> f32 {
    let pairs = a.iter().flatten().zip(b.iter().flatten());
    pairs.fold(0.0, |most, (a, b)| most.max((a - b).abs()))
}

#[test]
fn fifty_steps_are_those_of_burns_adamw() {
    let adamw = AdamWConfig::new().with_weight_decay(0.125);
    let burns = train(&mut adamw.init(), Net::new(DType::F32), 0..50);
    let mut optimizer = config().init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..50);
    let distance = distance(&parameters(&burns), &parameters(&model));
    // Burn's 1 - beta_2^t is of f32 powers, 3e-5 / t off: over 50 steps of 0.01 that is 1e-6, and
    // the roundings of both come to as much.
    assert!(distance <= 4e-6, "{distance}");
    assert_eq!(optimizer.elements(), 9 * 13 + 7 + 2 * 5 * 3);
}

#[test]
fn a_low_precision_parameter_is_its_masters_rounding() {
    let full = train(&mut config().init().unwrap(), Net::new(DType::F32), 0..1);
    for dtype in [DType::BF16, DType::F16] {
        // The same weights and gradients, exactly.
        let model = Net::<B>::new(dtype);
        let mut optimizer = config().init().unwrap();
        let model = train(&mut optimizer, model, 0..1);
        assert_eq!(model.inner.low.val().dtype(), dtype);
        // f32 parameters beside it do not change.
        assert_eq!(bits(&full)[0], bits(&model)[0]);
    }
    // Steps far below the precision of bf16 add up in the master.
    let device = Default::default();
    let one = TensorData::new(vec![bf16::ONE; 4], [4]);
    let weight = Tensor::<B, 1>::from_data(one, (&device, DType::BF16));
    let mut model = One {
        weight: Param::from_tensor(weight),
    };
    let adamw = HostAdamWConfig {
        weight_decay: 0.0,
        ..Default::default()
    };
    let mut optimizer = OffloadConfig::new(adamw).init().unwrap();
    for _ in 0..64 {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Flex, 1>::ones([4], &device).cast(DType::BF16);
        gradients.register(model.weight.id, gradient);
        model = optimizer.step(1e-4, model, gradients);
    }
    // 1 - 64e-4 is between 0.9921875 and 0.99609375; a step alone rounds back to 1.
    assert_eq!(parameters(&model)[0], [0.9921875; 4]);
}
