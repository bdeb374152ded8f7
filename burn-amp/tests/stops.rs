//! Where training cannot go on it stops, and says so.

mod support;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::{
    module::{Module, ModuleMapper, Param},
    optim::{Optimizer, SgdConfig},
    tensor::{DType, FloatDType, Tensor},
    train::Interrupter,
};
use burn_amp::{AmpError, Detection, GradScaler, GradScalerConfig};
use support::{B, Net, PATHS, gradients, net, values};

const LR: f64 = 0.1;

/// Overflows until the scale is 1, and once more.
fn collapse(scaler: &GradScaler) {
    let mut optimizer = scaler.wrap(SgdConfig::new().init());
    let net = net();
    let before = values(&net);
    for step in 0..3 {
        let after: Net<B> = optimizer.step(LR, net.clone(), gradients(&net, step, &[2, 5]));
        assert_eq!(values(&after), before);
    }
    // With deferred detection the verdict over the third comes with the fourth.
    let _: Net<B> = optimizer.step(LR, net.clone(), gradients(&net, 3, &[]));
}

fn about_to_collapse(detection: Detection) -> GradScaler {
    let config = GradScalerConfig {
        init_scale: 4.0,
        ..Default::default()
    };
    GradScaler::new(&config).unwrap().with_detection(detection)
}

fn collapsed() -> AmpError {
    let parameters = vec![PATHS[2].to_owned(), PATHS[5].to_owned()];
    AmpError::ScaleCollapsed {
        scale: 1.0,
        step: 3,
        parameters,
        scalers: 1,
    }
}

#[test]
fn a_collapsed_scale_panics() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = about_to_collapse(detection);
        let panic = catch_unwind(AssertUnwindSafe(|| collapse(&scaler))).unwrap_err();
        let message = panic.downcast::<String>().unwrap();
        assert_eq!(*message, collapsed().to_string());
        assert!(message.contains("layers.1.weight, norm.beta"), "{message}");
        assert_eq!(scaler.error(), Some(collapsed()));
    }
}

#[test]
fn a_collapsed_scale_stops_the_learner_if_it_can() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let interrupter = Interrupter::new();
        let scaler = about_to_collapse(detection).with_interrupter(interrupter.clone());
        collapse(&scaler);
        assert!(interrupter.should_stop());
        assert_eq!(interrupter.get_message(), Some(collapsed().to_string()));
        assert_eq!(scaler.error(), Some(collapsed()));
    }
}

#[test]
fn a_fixed_scale_stops_after_a_hundred_skipped_steps_in_a_row() {
    let interrupter = Interrupter::new();
    let scaler = GradScaler::new(GradScalerConfig::fixed(128.0))
        .unwrap()
        .with_interrupter(interrupter.clone());
    let mut optimizer = scaler.wrap(SgdConfig::new().init());
    let mut net = net();
    for step in 0..200 {
        assert!(!interrupter.should_stop(), "step {step}");
        let overflowing: &[usize] = if step == 99 { &[] } else { &[0] };
        net = optimizer.step(LR, net.clone(), gradients(&net, step, overflowing));
        assert_eq!(scaler.scale(), 128.0);
    }
    assert!(interrupter.should_stop());
}

#[test]
fn half_precision_parameters_are_refused() {
    for (dtype, cast) in [
        (DType::F16, FloatDType::F16),
        (DType::BF16, FloatDType::BF16),
    ] {
        let interrupter = Interrupter::new();
        let scaler = GradScaler::default().with_interrupter(interrupter.clone());
        let mut optimizer = scaler.wrap(SgdConfig::new().init());

        struct ToHalf(FloatDType);
        impl ModuleMapper<B> for ToHalf {
            fn map_float<const D: usize>(
                &mut self,
                param: Param<Tensor<B, D>>,
            ) -> Param<Tensor<B, D>> {
                param.map(|tensor| tensor.cast(self.0))
            }
        }
        let full = net();
        let gradients = gradients(&full, 0, &[]);
        let half = full.map(&mut ToHalf(cast));
        let _: Net<B> = optimizer.step(LR, half, gradients);

        let error = AmpError::HalfPrecisionParameter {
            path: PATHS[0].to_owned(),
            dtype,
        };
        assert_eq!(scaler.error(), Some(error.clone()));
        assert_eq!(interrupter.get_message(), Some(error.to_string()));
        assert!(error.to_string().starts_with("attempting to unscale"));
        assert_eq!(scaler.steps(), 0);
    }
}
