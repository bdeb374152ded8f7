//! What a user without a logger sees, and what code that reads f32 needs. A process of its own, for
//! a logger would be the process's.

use std::process::Command;

use burn::backend::Autodiff;
use burn::nn::{Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;
use burn_amp::{Autocast, F16, F32, autocast};
use burn_flex::Flex;

const CHILD: &str = "BURN_AMP_MESSAGES_CHILD";

#[test]
fn two_backward_passes_in_f16() {
    if std::env::var_os(CHILD).is_none() {
        return; // not run by the test below
    }
    type B = Autocast<Autodiff<Flex>, F16>;
    let device = Default::default();
    let linear: Linear<B> = LinearConfig::new(2, 2).init(&device);
    for _ in 0..2 {
        let x = Tensor::<B, 2>::ones([1, 2], &device);
        drop(linear.forward(x).sum().backward());
    }
}

#[test]
fn without_a_logger_a_missing_scaler_is_named_on_standard_error_once() {
    let program = std::env::current_exe().unwrap();
    let child = Command::new(program)
        .args(["--exact", "two_backward_passes_in_f16", "--nocapture"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(child.status.success());
    let said = String::from_utf8(child.stderr).unwrap();
    let warnings = said.matches("warning: backward in f16 without a loss scale");
    assert_eq!(warnings.count(), 1, "{said}");
}

/// As a crate whose code nobody can edit reads its results.
fn reads_f32<B: Backend>(linear: &Linear<B>, x: Tensor<B, 2>) -> Option<Vec<f32>> {
    linear.forward(x).into_data().to_vec::<f32>().ok()
}

#[test]
fn code_that_reads_f32_runs_in_an_f32_scope() {
    type B = Autocast<Flex>;
    let device = Default::default();
    let linear: Linear<B> = LinearConfig::new(2, 2).init(&device);
    let x = || Tensor::<B, 2>::ones([1, 2], &device);
    assert_eq!(reads_f32(&linear, x()), None);
    assert_eq!(
        autocast::<F32, _>(|| reads_f32(&linear, x())).map(|read| read.len()),
        Some(2)
    );
}
