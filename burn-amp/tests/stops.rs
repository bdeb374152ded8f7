//! Where training cannot go on it stops, and says so.

mod support;

use burn::{
    module::{Module, ModuleMapper, Param},
    optim::SgdConfig,
    tensor::{DType, FloatDType, Tensor},
    train::Interrupter,
};
use burn_amp::{AmpError, GradScaler, GradScalerConfig};
use burn_update::UpdateError;
use support::{B, Net, PATHS, gradients, net, scaled, values};

const LR: f64 = 0.1;

/// Overflows until the scale is 1, and once more.
fn collapse(scaler: &GradScaler) -> Result<(), UpdateError> {
    let mut update = scaled(scaler, SgdConfig::new().init());
    let net = net();
    let before = values(&net);
    for step in 0..3 {
        let after: Net<B> = update.step(LR, net.clone(), gradients(&net, step, &[2, 5]))?;
        assert_eq!(values(&after), before);
    }
    // An interrupter ends the training when it takes effect, and until then steps go on.
    let _: Net<B> = update.step(LR, net.clone(), gradients(&net, 3, &[]))?;
    Ok(())
}

fn about_to_collapse() -> GradScaler {
    let config = GradScalerConfig {
        init_scale: 4.0,
        ..Default::default()
    };
    GradScaler::new(&config).unwrap()
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
fn a_collapsed_scale_is_an_error() {
    let scaler = about_to_collapse();
    let error = collapse(&scaler).unwrap_err();
    assert_eq!(error.cause::<AmpError>(), Some(&collapsed()));
    let message = error.to_string();
    assert!(message.contains(&collapsed().to_string()), "{message}");
    assert!(message.contains("layers.1.weight, norm.beta"), "{message}");
    assert_eq!(scaler.error(), Some(collapsed()));
}

#[test]
fn a_collapsed_scale_stops_the_learner_if_it_can() {
    let interrupter = Interrupter::new();
    let scaler = about_to_collapse().with_interrupter(interrupter.clone());
    collapse(&scaler).unwrap();
    assert!(interrupter.should_stop());
    assert_eq!(interrupter.get_message(), Some(collapsed().to_string()));
    assert_eq!(scaler.error(), Some(collapsed()));
}

#[test]
fn a_fixed_scale_stops_after_a_hundred_skipped_steps_in_a_row() {
    let interrupter = Interrupter::new();
    let scaler = GradScaler::new(GradScalerConfig::fixed(128.0))
        .unwrap()
        .with_interrupter(interrupter.clone());
    let mut update = scaled(&scaler, SgdConfig::new().init());
    let mut net = net();
    for step in 0..200 {
        assert!(!interrupter.should_stop(), "step {step}");
        let overflowing: &[usize] = if step == 99 { &[] } else { &[0] };
        let gradients = gradients(&net, step, overflowing);
        net = update.step(LR, net, gradients).unwrap();
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
        let mut update = scaled(&scaler, SgdConfig::new().init());

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
        let _: Net<B> = update.step(LR, half, gradients).unwrap();

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
