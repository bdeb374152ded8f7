//! What is refused, by name and before anything has changed.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::DType;
use burn_flex::Flex;
use burn_zero::{OffloadConfig, OffloadedAdamW};

use super::support::*;

/// The message of a step, and the model after a good one with the same optimizer.
fn refused(
    optimizer: &mut OffloadedAdamW,
    lr: f64,
    model: &Net<B>,
    gradients: GradientsParams,
) -> String {
    let step = || optimizer.step(lr, model.clone(), gradients);
    let payload = catch_unwind(AssertUnwindSafe(step)).unwrap_err();
    *payload.downcast::<String>().unwrap()
}

#[test]
fn a_refused_step_changes_nothing() {
    let mut optimizer = config().init().unwrap();
    let model = train(&mut optimizer, Net::new(DType::F32), 0..3);
    let expected = bits(&train(&mut optimizer.clone(), model.clone(), 3..6));

    let mut foreign = model.gradients(3);
    foreign.register(model.inner.low.id, tensor::<Flex, 3>(1, [2, 5, 4]));
    let message = refused(&mut optimizer, 0.01, &model, foreign);
    assert!(message.contains("gradient of inner.low"), "{message}");
    assert!(
        message.contains("[2, 5, 4]") && message.contains("[2, 5, 3]"),
        "{message}"
    );

    let message = refused(&mut optimizer, f64::NAN, &model, model.gradients(3));
    assert!(message.contains("learning_rate"), "{message}");

    let mut other = model.clone();
    other.matrix = Param::initialized(model.matrix.id, tensor(1, [13, 9]));
    let mut gradients = GradientsParams::new();
    gradients.register(model.matrix.id, tensor::<Flex, 2>(1, [13, 9]));
    let message = refused(&mut optimizer, 0.01, &other, gradients);
    assert!(message.contains("state of matrix"), "{message}");

    assert_eq!(expected, bits(&train(&mut optimizer, model, 3..6)));
}

#[derive(Module, Debug)]
struct One<B: Backend, const D: usize> {
    weight: Param<Tensor<B, D>>,
}

#[test]
#[should_panic(expected = "weight is F64")]
fn double_precision_is_refused() {
    let weight = tensor::<B, 1>(1, [3]).cast(DType::F64);
    let model = One {
        weight: Param::from_tensor(weight),
    };
    let mut gradients = GradientsParams::new();
    gradients.register(model.weight.id, tensor::<Flex, 1>(2, [3]).cast(DType::F64));
    config().init().unwrap().step(0.1, model, gradients);
}

#[test]
fn a_gradient_that_is_not_finite_ends_in_its_parameter_only() {
    let model = Net::new(DType::F32);
    let mut gradients = model.gradients(0);
    let nan = tensor::<Flex, 1>(1, [7]).mul_scalar(f32::NAN);
    gradients.register(model.inner.sometimes.id, nan);
    let after = config().init().unwrap().step(0.01, model, gradients);
    let finite = parameters(&after)
        .iter()
        .map(|p| p.iter().all(|x| x.is_finite()))
        .collect::<Vec<_>>();
    assert_eq!(finite, [true, false, true, true]);
}

#[test]
fn what_cannot_work_is_named() {
    for (text, expected) in [
        (r#"{"bucket_elements": 0}"#, "bucket_elements = 0"),
        (r#"{"adamw": {"beta_2": 1}}"#, "beta_2 = 1"),
    ] {
        let config: OffloadConfig = serde_json::from_str(text).unwrap();
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
    assert!(serde_json::from_str::<OffloadConfig>(r#"{"ratio": 0.5}"#).is_err());
}
