//! Under a loss scaler and over micro-batches: a step that is skipped leaves the host bit for bit
//! as it was.

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::FullPrecisionSettings;
use burn::tensor::DType;
use burn_accum::AccumConfig;
use burn_amp::{GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_update::Update;
use serde_json::Value;

use super::support::*;

/// The steps with a NaN somewhere.
const BAD: [usize; 3] = [2, 3, 7];

fn gradients(model: &Net<B>, step: usize) -> GradientsParams {
    let mut gradients = model.gradients(step);
    if BAD.contains(&step) {
        let nan = tensor::<Flex, 3>(1, [2, 5, 3]).mul_scalar(f32::NAN);
        gradients.register(model.inner.low.id, nan);
    }
    gradients
}

fn on_host() -> Update<Net<B>, B> {
    Update::new(config().init().unwrap())
}

/// All of the optimizer's state and the parameters.
fn snapshot(update: &Update<Net<B>, B>, model: &Net<B>) -> (Value, Vec<Vec<u32>>) {
    let item = burn::record::Record::<B>::into_item::<FullPrecisionSettings>(update.record());
    let record = serde_json::to_value(item).unwrap();
    (record["parts"]["optimizer"].clone(), bits(model))
}

#[test]
fn a_skipped_step_leaves_every_bit() {
    let initial = Net::new(DType::F32);
    let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
    let mut update = on_host().scale(scaler.clone()).unwrap();
    let mut plain = on_host();
    let (mut model, mut expected) = (initial.clone(), initial);
    for step in 0..9 {
        let arrived = gradients(&model, step);
        model = update.step(0.01, model, arrived).unwrap();
        if !BAD.contains(&step) {
            let arrived = gradients(&expected, step);
            expected = plain.step(0.01, expected, arrived).unwrap();
        }
        let found = snapshot(&update, &model);
        assert_eq!(found, snapshot(&plain, &expected), "step {step}");
        assert!(found.0.is_object(), "no state");
    }
    assert_eq!(scaler.skipped_steps(), BAD.len() as u64);
}

#[test]
fn accumulation_calls_it_once_a_window() {
    let initial = Net::new(DType::F32);
    let windows = AccumConfig::mean(3);
    let mut update = on_host().accumulate(windows).unwrap();
    let mut model = initial.clone();
    for step in 0..9 {
        let before = snapshot(&update, &model);
        let gradients = model.gradients(step);
        model = update.step(0.01, model, gradients).unwrap();
        let changed = before != snapshot(&update, &model);
        assert_eq!(changed, step % 3 == 2, "micro-batch {step}");
    }
    let adamw = AdamWConfig::new().with_weight_decay(0.125);
    let mut burns = Update::new(adamw.init()).accumulate(windows).unwrap();
    let expected = parameters(&train(&mut burns, initial, 0..9));
    let pairs = expected
        .iter()
        .flatten()
        .zip(parameters(&model).into_iter().flatten());
    assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6));
}

#[test]
fn several_devices_are_added_up() {
    use burn::optim::MultiGradientsParams;
    let device: <Flex as burn_backend::BackendTypes>::Device = Default::default();
    let run = |optimizer: &mut dyn FnMut(Net<B>, MultiGradientsParams) -> Net<B>| {
        let mut model = Net::new(DType::F32);
        for step in 0..4 {
            let both = [2 * step, 2 * step + 1].map(|step| (model.gradients(step), device.to_id()));
            model = optimizer(model, MultiGradientsParams { grads: both.into() });
        }
        parameters(&model)
    };
    let mut on_host = config().init().unwrap();
    let mut burns = AdamWConfig::new().with_weight_decay(0.125).init();
    let found = run(&mut |model, gradients| on_host.step_multi(0.01, model, gradients));
    let expected = run(&mut |model, gradients| burns.step_multi(0.01, model, gradients));
    let pairs = expected.iter().flatten().zip(found.iter().flatten());
    assert!(pairs.into_iter().all(|(a, b)| (a - b).abs() < 1e-6));
}
