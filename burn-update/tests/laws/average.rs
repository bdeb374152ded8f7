//! The average of the weights.

use burn::module::AutodiffModule;
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig};
use burn::optim::SgdConfig;
use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::GradScalerConfig;
use burn_flex::Flex;
use burn_update::{AverageConfig, Update, UpdateError};

use crate::support::{F32, Half, LR, Net, adamw, bits, floats, gradients, net};

/// The formula, element by element in f64.
fn follows_the_formula<B: AutodiffBackend>(config: &AverageConfig) {
    let mut update = Update::new(adamw::<B>()).average(config.clone()).unwrap();
    let mut model = net::<B>();
    let error = update.averaged(&model).unwrap_err();
    assert!(matches!(error, UpdateError::NoAverage { has_part: true }));
    let mut expected: Vec<f64> = floats(&model).concat().into_iter().map(f64::from).collect();
    for step in 1..=20 {
        let made_up = gradients(&model, step, &[]);
        model = update.step(LR, model, made_up).unwrap();
        let warm = f64::from(1 + step as u32) / f64::from(10 + step as u32);
        let decay = if config.warm_up {
            config.decay.min(warm)
        } else {
            config.decay
        };
        for (average, weight) in expected.iter_mut().zip(floats(&model).concat()) {
            *average = decay * *average + (1.0 - decay) * f64::from(weight);
        }
        let averaged = floats(&update.averaged(&model).unwrap()).concat();
        for (found, expected) in averaged.into_iter().zip(&expected) {
            assert!((f64::from(found) - expected).abs() < 1e-6, "step {step}");
        }
    }
    // The model itself is as without an average.
    let mut plain = Update::new(adamw::<B>());
    let mut expected = net::<B>();
    for step in 1..=20 {
        let made_up = gradients(&expected, step, &[]);
        expected = plain.step(LR, expected, made_up).unwrap();
    }
    assert_eq!(bits(&model), bits(&expected));
}

#[test]
fn the_average_follows_its_formula_with_and_without_warm_up() {
    for config in [
        AverageConfig::new(0.9),
        AverageConfig::new(0.3),
        AverageConfig::new(0.9).with_warm_up(false),
    ] {
        follows_the_formula::<F32>(&config);
        follows_the_formula::<Half>(&config);
    }
}

#[test]
fn micro_batches_and_skipped_steps_do_not_move_it() {
    let mut update = Update::new(adamw::<F32>())
        .average(AverageConfig::new(0.5))
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap()
        .scale(GradScalerConfig::default())
        .unwrap();
    let mut model = net::<F32>();
    let mut averages = Vec::new();
    for (step, bad) in [&[][..], &[], &[], &[1], &[]].into_iter().enumerate() {
        let made_up = gradients(&model, step, bad);
        model = update.step(LR, model, made_up).unwrap();
        let average = update.averaged(&model).ok();
        averages.push(average.map(|net| bits(&net)));
    }
    assert_eq!(averages[0], None);
    assert!(averages[1].is_some());
    assert_eq!(averages[1], averages[2]);
    assert_eq!(averages[1], averages[3]);
    assert_ne!(averages[1], averages[4]);
}

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    linear: Linear<B>,
    norm: BatchNorm<B>,
}

/// The averaged model has the model's running statistics, and the model keeps its own.
#[test]
fn running_statistics_are_the_models() {
    let device = Default::default();
    let mut model = Normed::<F32> {
        linear: LinearConfig::new(4, 4).init(&device),
        norm: BatchNormConfig::new(4).init(&device),
    };
    let sgd = SgdConfig::new().init();
    let mut update = Update::new(sgd).average(AverageConfig::new(0.5)).unwrap();
    for _ in 0..3 {
        let rows = [
            [0.1, -0.4, 0.9, 0.3],
            [0.7, 0.2, -0.5, 0.6],
            [0.2, 0.8, 0.3, -0.9],
        ];
        let x = Tensor::<F32, 2>::from_data(rows, &device);
        let loss = model
            .norm
            .forward(model.linear.forward(x))
            .powi_scalar(3)
            .sum();
        let gradients = update.backward(&model, loss);
        model = update.step(LR, model, gradients).unwrap();
    }
    let mean = |norm: &BatchNorm<Flex>| norm.running_mean.value_sync().into_data();
    let before = mean(&model.valid().norm);
    let averaged = update.averaged(&model).unwrap();
    assert_eq!(mean(&averaged.norm), before);
    assert_eq!(mean(&model.valid().norm), before);
    let weight = |linear: &Linear<Flex>| linear.weight.val().into_data();
    assert_ne!(weight(&averaged.linear), weight(&model.valid().linear));
}

#[test]
fn what_cannot_work_is_refused() {
    for decay in [-0.1, 1.0, f64::NAN] {
        let error = Update::<Net<F32>, F32>::new(adamw()).average(AverageConfig::new(decay));
        let error = error.unwrap_err();
        assert!(
            matches!(error, UpdateError::InvalidValue { name: "decay", .. }),
            "{error}"
        );
    }
    let model = net::<F32>();
    let error = Update::new(adamw()).averaged(&model).unwrap_err();
    assert!(
        matches!(error, UpdateError::NoAverage { has_part: false }),
        "{error}"
    );
}
