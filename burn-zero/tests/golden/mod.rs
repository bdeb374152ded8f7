//! PyTorch's numbers of AdamW.
#![allow(dead_code)] // each test uses its part

use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

/// A training of some steps.
#[derive(Deserialize)]
pub struct Case {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    pub eps: f64,
    pub weight_decay: f64,
    pub initial: Vec<f32>,
    pub grads: Vec<Vec<f32>>,
    pub params_after_step: Vec<Vec<f32>>,
    pub exp_avg_last: Vec<f32>,
    pub exp_avg_sq_last: Vec<f32>,
}

/// All that were recorded.
pub fn cases() -> Vec<Case> {
    let golden: Golden = serde_json::from_str(include_str!("adamw.json")).unwrap();
    golden.cases
}
