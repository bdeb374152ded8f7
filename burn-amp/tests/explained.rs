//! `explain_overflow` names the first operation that is not finite under every policy, with and
//! without a loss scaler.

use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::module::Param;
use burn::nn::{Linear, LinearConfig};
use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::Tensor;
use burn_amp::{
    AmpConfig, Autocast, Bf16, Configured, F16, F32, GradScaler, Off, Policy, Watch,
    explain_overflow, explained,
};
use burn_flex::Flex;
use burn_update::Update;

type B<P> = Autocast<Autodiff<Watch<Flex>>, P>;

/// One test at a time: a scaler that lives scales the f16 losses of models without one.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn linear<P: Policy>(weight: f32) -> Linear<B<P>> {
    let device = Default::default();
    Linear {
        weight: Param::from_data([[weight]], &device),
        ..LinearConfig::new(1, 1).with_bias(false).init(&device)
    }
}

type Step<P> = fn(&Linear<B<P>>, f32) -> GradientsParams;

/// The first operation of a step that is not finite, and whether it was in the backward pass.
fn explanation<P: Policy>(
    weight: f32,
    steps: &[f32],
    step: Step<P>,
) -> Option<(&'static str, bool)> {
    let model = linear::<P>(weight);
    for x in steps {
        explain_overflow(&model, *x, step);
    }
    let found = explained::<B<P>, _>(&model)?;
    assert!(found.parameter.is_none_or(|path| path == "weight"));
    Some((found.operation, found.backward))
}

fn output<P: Policy>(model: &Linear<B<P>>, x: f32) -> Tensor<B<P>, 2> {
    model.forward(Tensor::full([1, 1], x, &Default::default()))
}

/// The logarithm of a number below 0.
fn nan_loss<P: Policy>(model: &Linear<B<P>>, x: f32) -> GradientsParams {
    GradientsParams::from_grads(output(model, x).log().mean().backward(), model)
}

/// A finite loss with an infinite gradient.
fn infinite_gradient<P: Policy>(model: &Linear<B<P>>, x: f32) -> GradientsParams {
    GradientsParams::from_grads(output(model, x).sqrt().mean().backward(), model)
}

fn is_explained<P: Policy>() {
    let policy = P::name();
    // No step is bad, the last is, the first is.
    let log = |steps: &[f32]| explanation::<P>(1.0, steps, nan_loss::<P>);
    assert_eq!(log(&[1.0, 2.0]), None, "{policy}");
    assert_eq!(log(&[1.0, -1.0]), Some(("float_log", false)), "{policy}");
    assert_eq!(log(&[-1.0, 1.0]), Some(("float_log", false)), "{policy}");
    let root = explanation::<P>(1.0, &[1.0, 0.0], infinite_gradient::<P>);
    let (_, is_backward) = root.unwrap_or_else(|| panic!("{policy}: nothing found"));
    assert!(is_backward, "{policy}: {root:?}");
}

#[test]
fn the_first_operation_is_named_under_every_policy_without_a_scaler() {
    let _turn = turn();
    AmpConfig::bf16().install().unwrap();
    is_explained::<Bf16>();
    is_explained::<F16>();
    is_explained::<F32>();
    is_explained::<Off>();
    is_explained::<Configured>();
    let _scaler = GradScaler::disabled();
    is_explained::<Bf16>();
}

#[test]
fn a_scaled_step_runs_again_at_its_scale_and_out_of_the_scalers_sight() {
    let _turn = turn();
    type F = B<F16>;
    let scaler = GradScaler::default();
    let update = Update::new(SgdConfig::new().init::<F, Linear<F>>());
    let mut update = update.scale(scaler.clone()).unwrap();
    let mut model = linear::<F16>(1.0);
    // At scales of 65536 and 32768 the gradient of 2 is not finite in f16; without one it is.
    for _ in 0..4 {
        let gradients = explain_overflow(&model, 2.0, |model, x| {
            GradientsParams::from_grads(output(model, x).mean().backward(), model)
        });
        model = update.step(1e-3, model, gradients).unwrap();
    }
    let found = scaler.first_non_finite().expect("explained");
    assert!(found.backward, "{found}");
    assert_eq!(explained::<F, _>(&model), Some(found));
    assert_eq!((scaler.skipped_steps(), scaler.steps()), (2, 4));
}
