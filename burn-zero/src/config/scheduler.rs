//! The learning-rate schedule that a configuration names.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

/// DeepSpeed's warm-up schedules (`deepspeed/runtime/lr_schedules.py`), as formulas of the number of the update.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", deny_unknown_fields)]
pub enum SchedulerConfig {
    /// From `min_lr` up to `max_lr`, and constant from there.
    WarmupLR {
        /// How it rises.
        warmup: Warmup,
        /// The first learning rate. Default 0.
        min_lr: f64,
        /// The last learning rate; the optimizer's where there is none.
        max_lr: Option<f64>,
    },
    /// From `min_lr` up to `max_lr`, and along a line down to 0.
    WarmupDecayLR {
        /// How it rises.
        warmup: Warmup,
        /// The first learning rate. Default 0.
        min_lr: f64,
        /// The highest learning rate. Default 0.001.
        max_lr: f64,
        /// Updates in all.
        total_steps: u64,
    },
    /// From `min_ratio` of the optimizer's learning rate up to it, and along a cosine down to `end_ratio` of it.
    WarmupCosineLR {
        /// How it rises.
        warmup: Warmup,
        /// The first ratio. Default 0.
        min_ratio: f64,
        /// The last ratio. Default 0.0001.
        end_ratio: f64,
        /// Updates in all.
        total_steps: u64,
    },
}

/// How a learning rate rises.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// Updates until the highest learning rate. Default 1000; 2 is taken for 1.
    pub steps: u64,
    /// Along which curve. Default the logarithm.
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

    /// From 0 to 1, or `None` once it is over.
    fn risen(self, step: u64) -> Option<f64> {
        let steps = self.len();
        (step < steps).then(|| match self.shape {
            WarmupShape::Log => ((step + 1) as f64).ln() / (steps as f64).ln(),
            WarmupShape::Linear => step as f64 / steps as f64,
        })
    }
}

impl SchedulerConfig {
    /// The learning rate of update number `step`, counted from 0, under an optimizer of `optimizer_lr`.
    pub fn lr(&self, step: u64, optimizer_lr: f64) -> f64 {
        match *self {
            Self::WarmupLR {
                warmup,
                min_lr,
                max_lr,
            } => {
                let max_lr = max_lr.unwrap_or(optimizer_lr);
                min_lr + (max_lr - min_lr) * warmup.risen(step).unwrap_or(1.0)
            }
            Self::WarmupDecayLR {
                warmup,
                min_lr,
                max_lr,
                total_steps,
            } => {
                let left = total_steps.saturating_sub(step) as f64;
                let decaying = total_steps.saturating_sub(warmup.len()).max(1) as f64;
                let part = warmup.risen(step).unwrap_or(left / decaying);
                min_lr + (max_lr - min_lr) * part
            }
            Self::WarmupCosineLR {
                warmup,
                min_ratio,
                end_ratio,
                total_steps,
            } => {
                let ratio = match warmup.risen(step) {
                    Some(risen) => min_ratio + (1.0 - min_ratio) * risen,
                    None => end_ratio + (1.0 - end_ratio) * cosine(step, warmup.len(), total_steps),
                };
                optimizer_lr * ratio
            }
        }
    }
}

/// From 1 to 0 over the steps after the warm-up, and 0 from there.
fn cosine(step: u64, warmup: u64, total_steps: u64) -> f64 {
    let decaying = total_steps.saturating_sub(warmup).max(1) as f64;
    let progress = (step - warmup + 1) as f64 / decaying;
    (1.0 + (PI * progress.min(1.0)).cos()) / 2.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn close(actual: f64, expected: f64) {
        assert!(
            (actual - expected).abs() < 1e-12,
            "{actual} instead of {expected}"
        );
    }

    const LINEAR: Warmup = Warmup {
        steps: 4,
        shape: WarmupShape::Linear,
    };

    #[test]
    fn warm_up_rises_to_the_optimizers_rate_and_stays() {
        let warmup = SchedulerConfig::WarmupLR {
            warmup: LINEAR,
            min_lr: 0.0,
            max_lr: None,
        };
        let rates: Vec<f64> = (0..6).map(|step| warmup.lr(step, 0.8)).collect();
        assert_eq!(rates, [0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8]);

        let log = Warmup {
            steps: 8,
            shape: WarmupShape::Log,
        };
        let warmup = SchedulerConfig::WarmupLR {
            warmup: log,
            min_lr: 0.1,
            max_lr: Some(1.1),
        };
        close(warmup.lr(0, 5.0), 0.1);
        close(warmup.lr(1, 5.0), 0.1 + 1.0 / 3.0);
        close(warmup.lr(3, 5.0), 0.1 + 2.0 / 3.0);
        close(warmup.lr(7, 5.0), 1.1);
    }

    #[test]
    fn decay_ends_at_zero() {
        let decay = SchedulerConfig::WarmupDecayLR {
            warmup: LINEAR,
            min_lr: 0.0,
            max_lr: 1.0,
            total_steps: 8,
        };
        close(decay.lr(2, 9.0), 0.5);
        close(decay.lr(4, 9.0), 1.0);
        close(decay.lr(7, 9.0), 0.25);
        close(decay.lr(8, 9.0), 0.0);
        close(decay.lr(100, 9.0), 0.0);
    }

    #[test]
    fn cosine_ends_at_its_floor_and_stays() {
        let cosine = SchedulerConfig::WarmupCosineLR {
            warmup: LINEAR,
            min_ratio: 0.5,
            end_ratio: 0.1,
            total_steps: 8,
        };
        close(cosine.lr(0, 2.0), 1.0);
        close(cosine.lr(2, 2.0), 1.5);
        close(cosine.lr(5, 2.0), 2.0 * (0.1 + 0.9 * 0.5));
        close(cosine.lr(7, 2.0), 0.2);
        close(cosine.lr(1000, 2.0), 0.2);
        let none_left = SchedulerConfig::WarmupCosineLR {
            warmup: LINEAR,
            min_ratio: 0.0,
            end_ratio: 0.1,
            total_steps: 2,
        };
        close(none_left.lr(4, 2.0), 0.2);
    }
}
