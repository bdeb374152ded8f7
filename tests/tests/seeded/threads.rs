//! Two training threads on one device, each with its own policy and its own loss scale.

use std::sync::Barrier;
use std::thread;

use burn::backend::Autodiff;
use burn::module::AutodiffModule;
use burn::nn::{Linear, LinearConfig, loss::MseLoss, loss::Reduction};
use burn::optim::{AdamConfig, GradientsParams};
use burn::tensor::{DType, Distribution, Tensor};
use burn_amp::{Autocast, Bf16, F16, GradScaler, GradScalerConfig, Off, Policy, autocast};
use burn_flex::Flex;
use burn_update::Update;
use tests::compare::values;

type B = Autocast<Autodiff<Flex>>;

/// Losses and scales of a run under policy `P`, in which the loss overflows at step `overflow`.
fn run<P: Policy>(
    model: Linear<B>,
    x: Tensor<B, 2>,
    init_scale: f32,
    overflow: usize,
    together: &Barrier,
) -> Vec<(f32, f32)> {
    let config = GradScalerConfig {
        init_scale,
        growth_interval: 4,
        ..Default::default()
    };
    let scaler = GradScaler::new(&config).expect("valid");
    let update = Update::new(AdamConfig::new().init()).scale(scaler.clone());
    let mut update = update.expect("no other scale");
    let mut model = Some(model);
    (0..12)
        .map(|step| {
            together.wait();
            autocast::<P, _>(|| {
                let now = model.take().expect("the model");
                let y = now.forward(x.clone());
                assert_eq!(y.dtype(), P::mode().low().map_or(DType::F32, DType::from));
                let loss = MseLoss::new().forward(y, x.clone(), Reduction::Mean);
                let value = values(loss.clone())[0];
                let factor = if step == overflow { 1e38 } else { 1.0 };
                let grads = loss.mul_scalar(factor).backward();
                let grads = GradientsParams::from_grads(grads, &now);
                model = Some(update.step(1e-2, now, grads).expect("it goes on"));
                (value, scaler.scale())
            })
        })
        .collect()
}

/// The gradient of `1e35 w` on another thread.
fn gradient_elsewhere<P: Policy>() -> f32 {
    thread::spawn(|| {
        type T<P> = Autocast<Autodiff<Flex>, P>;
        let w = Tensor::<T<P>, 1>::ones([1], &Default::default()).require_grad();
        let grads = w.clone().mul_scalar(1e35).backward();
        values(w.grad(&grads).expect("a gradient"))[0]
    })
    .join()
    .expect("no panic")
}

#[test]
fn a_run_without_a_scaler_does_not_meet_that_of_another() {
    let _turn = super::turn();
    let scaler = GradScaler::new(GradScalerConfig::default()).expect("valid");
    let adam = AdamConfig::new().init::<B, Linear<B>>();
    let update = Update::new(adam).scale(scaler.clone());
    assert_eq!(gradient_elsewhere::<Off>(), 1e35);
    assert_eq!(gradient_elsewhere::<Bf16>(), 1e35);
    // A worker of an f16 run finds the only scaler of the process.
    assert_eq!(gradient_elsewhere::<F16>(), f32::INFINITY);
    drop((scaler, update));
    assert_eq!(gradient_elsewhere::<F16>(), 1e35);
}

#[test]
fn do_not_disturb_each_other() {
    let _turn = super::turn();
    let device = Default::default();
    let model: Linear<B> = LinearConfig::new(8, 8).init(&device);
    let x = Tensor::random([4, 8], Distribution::Normal(0.0, 1.0), &device);
    values(model.valid().weight.val());

    let alone = Barrier::new(1);
    let expected_f16 = run::<F16>(model.clone(), x.clone(), 1024.0, 3, &alone);
    let expected_bf16 = run::<Bf16>(model.clone(), x.clone(), 64.0, 7, &alone);
    assert_ne!(expected_f16, expected_bf16);

    let both = Barrier::new(2);
    thread::scope(|scope| {
        let f16 = scope.spawn(|| run::<F16>(model.clone(), x.clone(), 1024.0, 3, &both));
        let bf16 = scope.spawn(|| run::<Bf16>(model.clone(), x.clone(), 64.0, 7, &both));
        assert_eq!(f16.join().expect("no panic"), expected_f16);
        assert_eq!(bf16.join().expect("no panic"), expected_bf16);
    });
}
