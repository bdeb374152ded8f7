//! A step with a non-finite gradient anywhere changes nothing, and moves the scale.

#[path = "../../../burn-amp/tests/traces/mod.rs"]
mod traces;

use burn::module::{Module, ModuleMapper, Param};
use burn::optim::SgdConfig;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_accum::AccumConfig;
use burn_amp::{AmpError, GradScaler, GradScalerConfig};
use burn_update::{AverageConfig, Update, UpdateError};
use traces::traces;

use crate::support::{F32, Half, LR, Net, PATHS, adamw, bits, gradients, net};

#[test]
fn the_scale_follows_the_traces_of_pytorch() {
    let traces = traces();
    assert_eq!(traces.len(), 5);
    for (number, case) in traces.iter().enumerate() {
        let scaler = GradScaler::new(case.config()).unwrap();
        let mut update = Update::new(adamw()).scale(scaler.clone()).unwrap();
        let mut model = net::<F32>();
        for (step, &found_inf) in case.found_inf.iter().enumerate() {
            let bad = [step % PATHS.len()];
            let bad: &[usize] = if found_inf == 1 { &bad } else { &[] };
            let gradients = gradients(&model, step, bad);
            model = update.step(LR, model, gradients).unwrap();
            let found = (scaler.scale(), scaler.growth_tracker());
            let tracker = case.growth_tracker_after_update[step];
            let expected = (case.scale_after_update[step], tracker);
            assert_eq!(found, expected, "case {number}, step {step}");
        }
        let skipped = case.found_inf.iter().filter(|&&found| found == 1).count() as u64;
        assert_eq!(scaler.skipped_steps(), skipped);
        assert_eq!(update.updates(), 60 - skipped);
    }
}

/// Everything that an update keeps, but the state of the scale, as a value that can be compared.
fn state<B: AutodiffBackend>(update: &Update<Net<B>, B>) -> Vec<String> {
    let record = update.record().without("scale");
    let item = Record::<B>::into_item::<FullPrecisionSettings>(record);
    let all = serde_json::to_value(item).unwrap();
    let parts = all["parts"].as_object().unwrap().iter();
    // Burn's record of an optimizer is a hash map, whose order differs.
    let parts = parts.filter(|(name, _)| *name != "optimizer");
    parts
        .map(|(name, part)| format!("{name}: {part}"))
        .collect()
}

fn skips_exactly<B: AutodiffBackend>() {
    let scaler = GradScaler::default();
    let average = AverageConfig::new(0.9);
    let mut update = Update::new(adamw::<B>())
        .average(average.clone())
        .unwrap()
        .scale(scaler.clone())
        .unwrap();
    let mut expected = Update::new(adamw::<B>()).average(average).unwrap();
    let (mut model, mut expected_model) = {
        let start = net::<B>();
        (start.clone(), start)
    };
    for step in 0..40 {
        let all: Vec<_> = (0..PATHS.len()).collect();
        let bad: &[usize] = match step % 4 {
            1 => &[step % 3],
            3 if step > 20 => &all,
            _ => &[],
        };
        let made_up = gradients(&model, step, bad);
        model = update.step(LR, model, made_up).unwrap();
        if bad.is_empty() {
            let made_up = gradients(&expected_model, step, &[]);
            expected_model = expected.step(LR, expected_model, made_up).unwrap();
        }
        assert_eq!(bits(&model), bits(&expected_model), "step {step}");
        if step > 0 {
            assert_eq!(state(&update), state(&expected), "step {step}");
        }
    }
    assert_eq!((scaler.steps(), scaler.skipped_steps()), (40, 15));
    assert_eq!(update.updates(), 25);
}

/// Parameters, moments, the average and the number of updates are those of a training without the
/// skipped steps: AdamW's next update shows its moments and step counts.
#[test]
fn a_skipped_step_changes_no_bit() {
    skips_exactly::<F32>();
    skips_exactly::<Half>();
}

#[test]
fn a_loss_in_f16_is_scaled_and_an_overflow_found() {
    let scaler = GradScaler::new(GradScalerConfig {
        init_scale: 2.0_f32.powi(30),
        ..Default::default()
    });
    let scaler = scaler.unwrap();
    let mut update = Update::new(adamw()).scale(scaler.clone()).unwrap();
    let mut model = net::<Half>();
    let before = bits(&model);
    for step in 0..30 {
        let loss = model.loss(step, step + 4);
        let gradients = update.backward(&model, loss);
        model = update.step(LR, model, gradients).unwrap();
        if step == 0 {
            assert_eq!(bits(&model), before);
        }
    }
    // It overflows in f16 until the scale is low enough, and is taken from then on.
    assert!(scaler.skipped_steps() > 5 && scaler.skipped_steps() < 25);
    assert_eq!(update.updates(), 30 - scaler.skipped_steps());
    assert!(scaler.scale() < 2.0_f32.powi(25));
}

/// Asserts that losses of `scaler` have this scale: the gradient of an f16 tensor times it is in the
/// range of f16 or just beyond. The host does not ask the scaler for it.
fn assert_active(scaler: &GradScaler, scale: f32) {
    for (scaled, is_finite) in [(64_512.0, true), (65_536.0, false)] {
        let x = Tensor::<Half, 1>::ones([1], (&Default::default(), DType::F16)).require_grad();
        let gradient = scaled / scale;
        let gradients = scaler.backward(x.clone().mul_scalar(gradient).sum());
        let found = x.grad(&gradients).unwrap().into_scalar();
        let expected = if is_finite { gradient } else { f32::INFINITY };
        assert_eq!(found, expected, "at a scale of {scale}");
    }
}

/// Within a window the host does not read which micro-batch overflowed, so the device selects the
/// scale of the next loss.
#[test]
fn the_device_computes_the_scale_that_the_host_would() {
    let overflows = [0, 1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 1].map(|overflows| overflows == 1);
    let steps = |check: &mut dyn FnMut(&GradScaler)| {
        let config = GradScalerConfig {
            init_scale: 8.0,
            growth_interval: 1,
            ..Default::default()
        };
        let scaler = GradScaler::new(config).unwrap();
        let mut update = Update::new(adamw())
            .accumulate(AccumConfig::mean(4))
            .unwrap()
            .scale(scaler.clone())
            .unwrap();
        let mut model = net::<Half>();
        for (step, overflows) in overflows.into_iter().enumerate() {
            let bad: &[usize] = if overflows { &[1] } else { &[] };
            let made_up = gradients(&model, step, bad);
            model = update.step(LR, model, made_up).unwrap();
            check(&scaler);
        }
    };
    let mut scales = Vec::new();
    steps(&mut |scaler| scales.push(scaler.scale()));
    let expected = [
        8.0, 4.0, 4.0, 4.0, 8.0, 4.0, 2.0, 2.0, 2.0, 2.0, 4.0, 4.0, 4.0, 2.0,
    ];
    assert_eq!(scales, expected);
    let mut scales = scales.into_iter();
    steps(&mut |scaler| assert_active(scaler, scales.next().unwrap()));
}

#[test]
fn an_error_of_the_scale_is_returned_with_its_type() {
    let config = GradScalerConfig {
        init_scale: 2.0,
        ..Default::default()
    };
    let mut update = Update::new(adamw()).scale(config).unwrap();
    let mut model = net::<F32>();
    let error = loop {
        let gradients = gradients(&model, 1, &[2]);
        match update.step(LR, model.clone(), gradients) {
            Ok(next) => model = next,
            Err(error) => break error,
        }
    };
    let cause = error.cause::<AmpError>().unwrap();
    assert!(
        matches!(cause, AmpError::ScaleCollapsed { step: 2, .. }),
        "{cause}"
    );
    assert!(error.to_string().contains("second.weight"), "{error}");

    let invalid = GradScalerConfig::fixed(-1.0);
    let error = Update::<Net<F32>, F32>::new(adamw()).scale(invalid);
    let error = error.unwrap_err();
    assert!(error.cause::<AmpError>().is_some(), "{error}");
}

#[test]
fn a_parameter_in_16_bits_is_refused_with_its_path() {
    struct Lower;
    impl ModuleMapper<F32> for Lower {
        fn map_float<const D: usize>(
            &mut self,
            param: Param<Tensor<F32, D>>,
        ) -> Param<Tensor<F32, D>> {
            param.map(|tensor| tensor.cast(DType::F16))
        }
    }
    let model = net::<F32>().map(&mut Lower);
    let sgd = SgdConfig::new().init::<F32, Net<F32>>();
    let mut update = Update::new(sgd).scale(GradScalerConfig::default()).unwrap();
    let gradients = gradients(&model, 0, &[]);
    let error = update.step(LR, model, gradients).unwrap_err();
    let cause = error.cause::<AmpError>().unwrap();
    let AmpError::HalfPrecisionParameter { path, .. } = cause else {
        panic!("{cause}");
    };
    assert_eq!(path, "first.weight");
}

#[test]
fn a_disabled_scale_changes_nothing() {
    let mut update = Update::new(adamw())
        .scale(GradScalerConfig::disabled())
        .unwrap();
    let mut plain = Update::new(adamw());
    let (mut model, mut expected) = {
        let start = net::<F32>();
        (start.clone(), start)
    };
    for step in 0..3 {
        let made_up = gradients(&model, step, &[]);
        model = update.step(LR, model, made_up).unwrap();
        let made_up = gradients(&expected, step, &[]);
        expected = plain.step(LR, expected, made_up).unwrap();
    }
    assert_eq!(bits(&model), bits(&expected));
}

#[test]
fn a_second_part_of_one_name_is_refused() {
    let update = Update::<Net<F32>, F32>::new(adamw()).scale(GradScalerConfig::default());
    let error = update
        .unwrap()
        .scale(GradScalerConfig::default())
        .unwrap_err();
    assert!(
        matches!(&error, UpdateError::SameName { name } if name == "scale"),
        "{error}"
    );
}
