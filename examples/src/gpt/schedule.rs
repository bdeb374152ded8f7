//! The learning rate: up in a line, down in a cosine.

use std::f64::consts::PI;

use burn::lr_scheduler::LrScheduler;
use burn::optim::LearningRate;
use burn::tensor::backend::Backend;

/// Linear warm-up to a peak, then half a cosine (Loshchilov and Hutter 2017) down to a tenth of it.
///
/// The rate of an update is a function of its number alone, so the whole state is that number.
#[derive(Clone, Copy, Debug)]
pub struct WarmupCosine {
    peak: LearningRate,
    warmup: usize,
    steps: usize,
    done: usize,
}

impl WarmupCosine {
    /// A schedule over `steps` updates, the first `warmup` of which rise to the peak.
    pub fn new(peak: LearningRate, warmup: usize, steps: usize) -> Self {
        Self {
            peak,
            warmup,
            steps,
            done: 0,
        }
    }

    fn at(&self, step: usize) -> LearningRate {
        if step < self.warmup {
            return self.peak * (step + 1) as f64 / self.warmup as f64;
        }
        let fall = self.steps.saturating_sub(self.warmup).max(1);
        let fallen = ((step - self.warmup) as f64 / fall as f64).min(1.0);
        let floor = self.peak / 10.0;
        floor + (self.peak - floor) * 0.5 * (1.0 + (PI * fallen).cos())
    }
}

impl LrScheduler for WarmupCosine {
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
    use burn_flex::Flex;

    fn rates(mut schedule: WarmupCosine, count: usize) -> Vec<f64> {
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
            &rates(WarmupCosine::new(1.0, 4, 8), 9),
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
            &rates(WarmupCosine::new(1.0, 0, 2), 4),
            &[1.0, 0.55, 0.1, 0.1],
        );
        assert_near(
            &rates(WarmupCosine::new(1.0, 2, 2), 4),
            &[0.5, 1.0, 1.0, 0.1],
        );
    }

    #[test]
    fn goes_on_from_its_record() {
        let mut schedule = WarmupCosine::new(1e-3, 3, 10);
        rates_of(&mut schedule, 5);
        let record = schedule.to_record::<Flex>();
        let mut resumed = WarmupCosine::new(1e-3, 3, 10).load_record::<Flex>(record);
        assert_eq!(rates_of(&mut resumed, 6), rates_of(&mut schedule, 6));
    }

    fn rates_of(schedule: &mut WarmupCosine, count: usize) -> Vec<f64> {
        (0..count).map(|_| schedule.step()).collect()
    }
}
