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
            ..Default::default()
        };
        let mut optimizer = OffloadConfig::new(adamw).init::<B>().unwrap();
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
fn fifty_steps_are_those_of_burns_adamw_at_any_ratio() {
    let adamw = AdamWConfig::new().with_weight_decay(0.125);
    let burns = train(&mut adamw.init(), Net::new(DType::F32), 0..50);
    for ratio in [0.0, 0.2, 0.8, 1.0] {
        for staging in [1, 3, 100] {
            let config = OffloadConfig {
                staging,
                ..config(ratio)
            };
            let mut optimizer = config.init().unwrap();
            let model = train(&mut optimizer, Net::new(DType::F32), 0..50);
            let distance = distance(&parameters(&burns), &parameters(&model));
            // Burn's 1 - beta_2^t is of f32 powers, 3e-5 / t off: over 50 steps of 0.01 that is 1e-6, and the roundings
            // of both come to as much.
            assert!(distance <= 4e-6, "ratio {ratio}: {distance}");
            if ratio == 0.0 {
                assert_eq!(bits(&burns), bits(&model));
            }
            let (host, device) = optimizer.elements();
            assert_eq!(host + device, 9 * 13 + 7 + 2 * 5 * 3);
            assert!(
                device as f64 <= (1.0 - ratio) * 157.0,
                "{device} on the device"
            );
        }
    }
}

#[test]
fn the_first_that_fit_stay_on_the_device_and_what_has_a_master_does_not() {
    type Vectors = Vec<Param<Tensor<B, 1>>>;
    let device = Default::default();
    for (elements, low, ratio, on_device) in [
        (&[4, 8, 3, 1][..], usize::MAX, 0.5, 8),
        (&[4, 8], usize::MAX, 1.0, 0),
        (&[4, 0, 8], usize::MAX, 0.0, 12),
        (&[4, 8, 3], 0, 0.0, 11),
        (&[9, 1, 9], usize::MAX, 0.6, 1),
    ] {
        let vector = |(index, &elements): (usize, &usize)| {
            let vector = Tensor::<B, 1>::ones([elements], &device);
            let dtype = [DType::F32, DType::BF16][usize::from(index == low)];
            Param::from_tensor(vector.cast(dtype))
        };
        let model: Vectors = elements.iter().enumerate().map(vector).collect();
        let mut gradients = GradientsParams::new();
        for param in &model {
            gradients.register(param.id, param.val().inner());
        }
        let mut optimizer = config(ratio).init::<B>().unwrap();
        optimizer.step(0.1, model, gradients);
        let total: usize = elements.iter().sum();
        assert_eq!(optimizer.elements(), (total - on_device, on_device));
    }
}

#[test]
fn a_low_precision_parameter_is_its_masters_rounding() {
    let full = train(&mut config(1.0).init().unwrap(), Net::new(DType::F32), 0..1);
    for dtype in [DType::BF16, DType::F16] {
        // The same weights and gradients, exactly.
        let model = Net::<B>::new(dtype);
        let mut optimizer = config(1.0).init::<B>().unwrap();
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
    let mut optimizer = OffloadConfig::new(adamw).init::<B>().unwrap();
    for _ in 0..64 {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Flex, 1>::ones([4], &device).cast(DType::BF16);
        gradients.register(model.weight.id, gradient);
        model = optimizer.step(1e-4, model, gradients);
    }
    // 1 - 64e-4 is between 0.9921875 and 0.99609375; a step alone rounds back to 1.
    assert_eq!(parameters(&model)[0], [0.9921875; 4]);
}
