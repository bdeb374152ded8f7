//! The learning rate of each update.

use std::f64::consts::PI;

use burn::lr_scheduler::LrScheduler;
use burn::optim::LearningRate;
use burn::tensor::backend::Backend;

use super::scheduler::SchedulerConfig;

/// A learning rate that is a function of the number of the update alone, so that the whole state is that number.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    shape: Shape,
    done: usize,
}

#[derive(Clone, Copy, Debug)]
enum Shape {
    WarmupCosine {
        peak: LearningRate,
        warmup: usize,
        steps: usize,
    },
    Configured {
        scheduler: SchedulerConfig,
        optimizer_lr: LearningRate,
    },
}

impl Schedule {
    /// Over `steps` updates: a linear warm-up to the peak in the first `warmup`, then half a cosine (Loshchilov and Hutter
    /// 2017) down to a tenth of it.
    pub fn warmup_cosine(peak: LearningRate, warmup: usize, steps: usize) -> Self {
        let shape = Shape::WarmupCosine {
            peak,
            warmup,
            steps,
        };
        Self { shape, done: 0 }
    }

    /// One of DeepSpeed's, for an optimizer of this learning rate.
    pub fn configured(scheduler: SchedulerConfig, optimizer_lr: LearningRate) -> Self {
        let shape = Shape::Configured {
            scheduler,
            optimizer_lr,
        };
        Self { shape, done: 0 }
    }

    fn at(&self, step: usize) -> LearningRate {
        match self.shape {
            Shape::WarmupCosine {
                peak,
                warmup,
                steps,
            } => {
                if step < warmup {
                    return peak * (step + 1) as f64 / warmup as f64;
                }
                let fall = steps.saturating_sub(warmup).max(1);
                let fallen = ((step - warmup) as f64 / fall as f64).min(1.0);
                let floor = peak / 10.0;
                floor + (peak - floor) * 0.5 * (1.0 + (PI * fallen).cos())
            }
            Shape::Configured {
                scheduler,
                optimizer_lr,
            } => scheduler.lr(step as u64, optimizer_lr),
        }
    }
}

impl LrScheduler for Schedule {
    type Record<B: Backend> = usize;

    fn step(&mut self) -> LearningRate {
        let rate = self.at(self.done);
        self.done += 1;
        rate
    }

    fn to_record<B: Backend>(&self) -> usize {
        self.done
    }

    fn load_record<B: Backend>(mut self, done: usize) -> Self {
        self.done = done;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpt::scheduler::{Warmup, WarmupShape};
    use burn_flex::Flex;

    fn rates(mut schedule: Schedule, count: usize) -> Vec<f64> {
        (0..count).map(|_| schedule.step()).collect()
    }

    fn assert_near(rates: &[f64], expected: &[f64]) {
        assert_eq!(rates.len(), expected.len());
        for (rate, expected) in rates.iter().zip(expected) {
            assert!(
                (rate - expected).abs() < 1e-12,
                "{rates:?} is not {expected:?}"
            );
        }
    }

    #[test]
    fn rises_in_a_line_and_falls_in_a_cosine() {
        let slope = 0.9 * 0.5 * 0.5f64.sqrt();
        assert_near(
            &rates(Schedule::warmup_cosine(1.0, 4, 8), 9),
            &[
                0.25,
                0.5,
                0.75,
                1.0,
                1.0,
                0.55 + slope,
                0.55,
                0.55 - slope,
                0.1,
            ],
        );
    }

    #[test]
    fn stays_at_the_floor_after_the_end() {
        assert_near(
            &rates(Schedule::warmup_cosine(1.0, 0, 2), 4),
            &[1.0, 0.55, 0.1, 0.1],
        );
        assert_near(
            &rates(Schedule::warmup_cosine(1.0, 2, 2), 4),
            &[0.5, 1.0, 1.0, 0.1],
        );
    }

    #[test]
    fn deepspeeds_are_followed() {
        let warmup = SchedulerConfig::WarmupLR {
            warmup: Warmup {
                steps: 4,
                shape: WarmupShape::Linear,
            },
            min_lr: 0.0,
            max_lr: None,
        };
        assert_near(
            &rates(Schedule::configured(warmup, 0.8), 7),
            &[0.0, 0.0, 0.2, 0.4, 0.6, 0.8, 0.8],
        );
    }

    #[test]
    fn goes_on_from_its_record() {
        let mut schedule = Schedule::warmup_cosine(1e-3, 3, 10);
        rates_of(&mut schedule, 5);
        let record = schedule.to_record::<Flex>();
        let mut resumed = Schedule::warmup_cosine(1e-3, 3, 10).load_record::<Flex>(record);
        assert_eq!(rates_of(&mut resumed, 6), rates_of(&mut schedule, 6));
    }

    fn rates_of(schedule: &mut Schedule, count: usize) -> Vec<f64> {
        (0..count).map(|_| schedule.step()).collect()
    }
}
