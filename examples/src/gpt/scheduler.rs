//! The learning-rate schedule that a configuration names.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// DeepSpeed's warm-up schedules (`deepspeed/runtime/lr_schedules.py`), as formulas of the number of the update. In files its names are
/// DeepSpeed's.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type")]
pub enum SchedulerConfig {
    /// From `min_lr` up to `max_lr`, and constant from there.
    WarmupLR {
        /// How it rises.
        #[serde(flatten)]
        warmup: Warmup,
        /// The first learning rate. Default 0.
        #[serde(default, rename = "warmup_min_lr")]
        min_lr: f64,
        /// The last learning rate; the optimizer's where there is none.
        #[serde(rename = "warmup_max_lr")]
        max_lr: Option<f64>,
    },
    /// From `min_lr` up to `max_lr`, and along a line down to `min_lr`.
    WarmupDecayLR {
        /// How it rises.
        #[serde(flatten)]
        warmup: Warmup,
        /// The first and the last learning rate. Default 0.
        #[serde(default, rename = "warmup_min_lr")]
        min_lr: f64,
        /// The highest learning rate. Default 0.001.
        #[serde(default = "highest", rename = "warmup_max_lr")]
        max_lr: f64,
        /// Updates in all, at least 1.
        #[serde(default, rename = "total_num_steps")]
        total_steps: u64,
    },
    /// From `min_ratio` of the optimizer's learning rate up to it, and along a cosine down to `end_ratio` of it.
    WarmupCosineLR {
        /// How it rises.
        #[serde(flatten)]
        warmup: Warmup,
        /// The first ratio. Default 0.
        #[serde(default, rename = "warmup_min_ratio")]
        min_ratio: f64,
        /// The last ratio. Default 0.0001.
        #[serde(default = "last_ratio", rename = "cos_min_ratio")]
        end_ratio: f64,
        /// Updates in all, at least 1.
        #[serde(default, rename = "total_num_steps")]
        total_steps: u64,
    },
}

/// How a learning rate rises.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Warmup {
    /// Steps of the schedule until the highest learning rate. Default 1000; 1 is taken for 2.
    #[serde(rename = "warmup_num_steps")]
    pub steps: u64,
    /// Along which curve. Default the logarithm.
    #[serde(rename = "warmup_type")]
    pub shape: WarmupShape,
}

/// The curve of a warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmupShape {
    /// `log(step + 1) / log(steps)`
    #[default]
    Log,
    /// `step / steps`
    Linear,
}

fn highest() -> f64 {
    1e-3
}

fn last_ratio() -> f64 {
    1e-4
}

impl Default for Warmup {
    fn default() -> Self {
        Self {
            steps: 1000,
            shape: WarmupShape::Log,
        }
    }
}

impl Warmup {
    fn len(self) -> u64 {
        self.steps.max(2)
    }

    /// The progress of the warm-up from 0 to 1; `None` after it.
    fn risen(self, step: u64) -> Option<f64> {
        let steps = self.len();
        (step < steps).then(|| match self.shape {
            WarmupShape::Log => ((step + 1) as f64).ln() / (steps as f64).ln(),
            WarmupShape::Linear => step as f64 / steps as f64,
        })
    }
}

impl SchedulerConfig {
    /// How it rises.
    pub fn warmup(&self) -> Warmup {
        match self {
            Self::WarmupLR { warmup, .. }
            | Self::WarmupDecayLR { warmup, .. }
            | Self::WarmupCosineLR { warmup, .. } => *warmup,
        }
    }

    /// The learning rate of update number `update`, counted from 0, under an optimizer of `optimizer_lr`.
    ///
    /// DeepSpeed steps a schedule after each update, so update number `n` has the rate of step `n - 1`. The first has the rate
    /// that the schedule begins with: `min_lr`, and 0 for [`WarmupCosineLR`](Self::WarmupCosineLR).
    pub fn lr(&self, update: u64, optimizer_lr: f64) -> f64 {
        let step = update.checked_sub(1);
        let risen = |step| self.warmup().risen(step);
        match *self {
            Self::WarmupLR { min_lr, max_lr, .. } => {
                let part = step.map_or(0.0, |step| risen(step).unwrap_or(1.0));
                min_lr + (max_lr.unwrap_or(optimizer_lr) - min_lr) * part
            }
            Self::WarmupDecayLR {
                min_lr,
                max_lr,
                total_steps,
                ..
            } => {
                let falls =
                    |step| total_steps.saturating_sub(step) as f64 / self.decay(total_steps);
                let part = step.map_or(0.0, |step| risen(step).unwrap_or_else(|| falls(step)));
                min_lr + (max_lr - min_lr) * part
            }
            Self::WarmupCosineLR {
                min_ratio,
                end_ratio,
                total_steps,
                warmup,
            } => {
                let Some(step) = step else { return 0.0 };
                let ratio = match risen(step) {
                    Some(risen) => min_ratio + (1.0 - min_ratio) * risen,
                    None => {
                        let fallen = (step - warmup.len() + 1) as f64 / self.decay(total_steps);
                        let part = (1.0 + (PI * fallen.min(1.0)).cos()) / 2.0;
                        end_ratio + (1.0 - end_ratio) * part
                    }
                };
                optimizer_lr * ratio
            }
        }
    }

    /// Steps after the warm-up, at least 1.
    fn decay(&self, total_steps: u64) -> f64 {
        total_steps.saturating_sub(self.warmup().len()).max(1) as f64
    }
}
