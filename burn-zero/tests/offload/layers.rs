//! Under a loss scaler and over micro-batches: a step that is skipped leaves the host bit for bit
//! as it was.

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn::record::FullPrecisionSettings;
use burn::tensor::DType;
use burn_accum::{AccumConfig, MultiSteps};
use burn_amp::{Detection, GradScaler, GradScalerConfig};
use burn_flex::Flex;
use burn_zero::OffloadedAdamW;

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

/// All of the state and the parameters.
fn snapshot(optimizer: &OffloadedAdamW, model: &Net<B>) -> (Vec<(String, String)>, Vec<Vec<u32>>) {
    let record = Optimizer::<Net<B>, B>::to_record(optimizer);
    let item = burn::record::Record::<B>::into_item::<FullPrecisionSettings>(record);
    let mut entries: Vec<_> = item
        .iter()
        .map(|(id, entry)| (id.clone(), serde_json::to_string(entry).unwrap()))
        .collect();
    entries.sort();
    (entries, bits(model))
}

#[test]
fn a_skipped_step_leaves_every_bit() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let initial = Net::new(DType::F32);
        let scaler = GradScaler::new(GradScalerConfig::default()).unwrap();
        let scaler = scaler.with_detection(detection);
        let mut optimizer = scaler.wrap(config().init().unwrap());
        let mut plain = config().init().unwrap();
        let (mut model, mut expected) = (initial.clone(), initial);
        for step in 0..9 {
            let arrived = gradients(&model, step);
            model = optimizer.step(0.01, model, arrived);
            if !BAD.contains(&step) {
                let arrived = gradients(&expected, step);
                expected = plain.step(0.01, expected, arrived);
            }
            let found = snapshot(optimizer.inner(), &model);
            assert_eq!(
                found,
                snapshot(&plain, &expected),
                "{detection:?}, step {step}"
            );
        }
        assert_eq!(scaler.skipped_steps(), BAD.len() as u64);
    }
}

#[test]
fn accumulation_calls_it_once_a_window() {
    let initial = Net::new(DType::F32);
    let multi = || AccumConfig::mean(3);
    let mut on_host = MultiSteps::new(config().init().unwrap(), multi()).unwrap();
    let mut model = initial.clone();
    for step in 0..9 {
        let before = snapshot(on_host.inner(), &model);
        let gradients = model.gradients(step);
        model = on_host.step(0.01, model, gradients);
        let changed = before != snapshot(on_host.inner(), &model);
        assert_eq!(changed, step % 3 == 2, "micro-batch {step}");
    }
    let adamw = AdamWConfig::new().with_weight_decay(0.125);
    let mut burns = MultiSteps::new(adamw.init(), multi()).unwrap();
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
