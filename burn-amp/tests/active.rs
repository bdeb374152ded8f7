//! Which scale `backward` uses, and what becomes of the losses that it saw.

mod support;

use std::{sync::Barrier, thread};

use burn::{
    backend::Autodiff,
    module::Param,
    nn::{Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{DType, Tensor, backend::AutodiffBackend},
    train::Interrupter,
};
use burn_amp::{AmpError, Autocast, F16, GradScaler, GradScalerConfig, OverflowCause};
use burn_flex::Flex;
use support::scaled;

type B = Autocast<Autodiff<Flex>, F16>;
type Gradients = <B as AutodiffBackend>::Gradients;

fn model() -> Linear<B> {
    let model = LinearConfig::new(1, 1)
        .with_bias(false)
        .init(&Default::default());
    Linear {
        weight: Param::from_data([[1.0_f32]], &Default::default()),
        ..model
    }
}

/// A gradient of this value.
fn gradients(model: &Linear<B>, value: f32) -> GradientsParams {
    let mut gradients = GradientsParams::new();
    let gradient = Tensor::<Autocast<Flex, F16>, 2>::full([1, 1], value, &Default::default());
    gradients.register(model.weight.id, gradient);
    gradients
}

fn scaler(init_scale: f32) -> GradScaler {
    let config = GradScalerConfig {
        init_scale,
        growth_interval: 3,
        ..Default::default()
    };
    GradScaler::new(&config).unwrap()
}

fn backward(scaler: &GradScaler, loss: f32) {
    let loss = Tensor::<B, 1>::from_data([loss], &Default::default());
    scaler.backward(loss.require_grad());
}

/// Asserts that `backward` uses this scale: the gradient of an f16 tensor times it is in the range
/// of f16 or just beyond.
fn assert_active(scale: f32, backward: impl Fn(Tensor<B, 1>) -> Gradients) {
    for (scaled, is_finite) in [(64_512.0, true), (65_536.0, false)] {
        let x = Tensor::<B, 1>::ones([1], (&Default::default(), DType::F16)).require_grad();
        let gradient = scaled / scale;
        let gradients = backward(x.clone().mul_scalar(gradient).sum());
        let found = x.grad(&gradients).unwrap().into_scalar();
        let expected = if is_finite { gradient } else { f32::INFINITY };
        assert_eq!(found, expected, "at a scale of {scale}");
    }
}

#[test]
fn each_thread_uses_the_scaler_of_its_update() {
    let both = Barrier::new(2);
    let run = |init_scale: f32| {
        let scaler = scaler(init_scale);
        let mut optimizer = scaled(&scaler, SgdConfig::new().init());
        both.wait();
        assert_active(init_scale, |loss| loss.backward());

        // The two share the device; only this thread's scale backs off.
        let model = model();
        let gradients = gradients(&model, f32::NAN);
        let _: Linear<B> = optimizer.step(0.1, model, gradients).unwrap();
        both.wait();
        assert_active(init_scale / 2.0, |loss| loss.backward());
    };
    thread::scope(|scope| {
        scope.spawn(|| run(1024.0));
        scope.spawn(|| run(64.0));
    });
}

#[test]
fn a_worker_thread_says_whose_a_loss_is() {
    let scaler = scaler(256.0);
    thread::scope(|scope| {
        scope.spawn(|| assert_active(256.0, |loss| scaler.backward(loss)));
    });
}

#[test]
fn a_disabled_scaler_scales_nothing() {
    let scaler = GradScaler::disabled();
    assert_active(1.0, |loss| scaler.backward(loss));
}

#[test]
fn a_non_finite_loss_is_told_apart_from_an_overflow() {
    let scaler = scaler(8.0);
    let mut optimizer = scaled(&scaler, SgdConfig::new().init());
    let mut step = |loss, gradient| {
        backward(&scaler, loss);
        let model = model();
        let gradients = gradients(&model, gradient);
        let _: Linear<B> = optimizer.step(0.1, model, gradients).unwrap();
        scaler.last_overflow().map(|overflow| overflow.cause)
    };
    assert_eq!(step(1.0, 1.0), None);
    assert_eq!(step(1.0, f32::INFINITY), Some(OverflowCause::Gradient));
    assert_eq!(step(f32::NAN, f32::NAN), Some(OverflowCause::NonFiniteLoss));
    assert_eq!(
        step(2.0, f32::NAN),
        Some(OverflowCause::Gradient),
        "losses are forgotten"
    );
    // Not the first steps, which are skipped without an error.
    assert_eq!(scaler.error(), None);
}

#[test]
fn a_loss_that_is_nan_from_the_first_step_stops_training() {
    let interrupter = Interrupter::new();
    let scaler = scaler(1024.0).with_interrupter(interrupter.clone());
    let mut optimizer = scaled(&scaler, SgdConfig::new().init());
    let mut step = || {
        backward(&scaler, f32::NAN);
        let model = model();
        let gradients = gradients(&model, f32::NAN);
        let _: Linear<B> = optimizer.step(0.1, model, gradients).unwrap();
        scaler.error()
    };
    assert_eq!(step(), None);
    assert_eq!(step(), None);
    let error = AmpError::NonFiniteLoss {
        step: 3,
        scale: 256.0,
        attempts: 3,
    };
    assert_eq!(step(), Some(error.clone()));
    assert!(interrupter.should_stop());
    assert_eq!(interrupter.get_message(), Some(error.to_string()));
}

#[test]
fn an_overflow_has_the_scale_of_its_backward_pass() {
    for (passes_first, expected) in [(true, 1024.0), (false, 512.0)] {
        let scaler = scaler(1024.0);
        let mut optimizers = [(); 2].map(|()| scaled(&scaler, SgdConfig::new().init()));
        if passes_first {
            (0..2).for_each(|_| backward(&scaler, 1.0));
        }
        for optimizer in &mut optimizers {
            if !passes_first {
                backward(&scaler, 1.0);
            }
            let model = model();
            let gradients = gradients(&model, f32::INFINITY);
            let _: Linear<B> = optimizer.step(0.1, model, gradients).unwrap();
        }
        let overflow = scaler.last_overflow().unwrap();
        assert_eq!((overflow.step, overflow.scale), (2, expected));
    }
}
