//! The traces that PyTorch's GradScaler wrote (`golden/gradscaler.json`).

use burn_amp::GradScalerConfig;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Trace>,
}

/// Updates of a scale, and what each left.
#[derive(Deserialize)]
pub struct Trace {
    init_scale: f32,
    growth_factor: f64,
    backoff_factor: f64,
    growth_interval: u32,
    /// 1 where a gradient was not finite.
    pub found_inf: Vec<u8>,
    pub scale_after_update: Vec<f32>,
    pub growth_tracker_after_update: Vec<u32>,
}

impl Trace {
    /// The settings of the scale.
    pub fn config(&self) -> GradScalerConfig {
        GradScalerConfig {
            init_scale: self.init_scale,
            growth_factor: self.growth_factor,
            backoff_factor: self.backoff_factor,
            growth_interval: self.growth_interval,
            min_scale: 0.0,
            ..Default::default()
        }
    }
}

/// All traces.
pub fn traces() -> Vec<Trace> {
    let golden: Golden = serde_json::from_str(include_str!("../golden/gradscaler.json")).unwrap();
    golden.cases
}
