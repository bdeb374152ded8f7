//! The steps of all settings, in turn.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn::prelude::Backend;

use super::memory::{Memory, peak_during};
use super::options::Options;
use super::report::{BenchReport, Figures, Outcome, SettingResult};
use super::setting::Setting;
use super::statistics::Quartiles;
use super::trainer::{Contender, contender};

/// Rounds that are timed however late it is.
const FEWEST_ROUNDS: usize = 3;

/// Steps over which memory is watched.
const MEMORY_STEPS: usize = 3;

/// Times the settings against each other. A setting that is alone has its memory watched too, after it was timed.
pub fn race<B: Backend>(options: &Options, device: &B::Device) -> BenchReport {
    let start = Instant::now();
    let is_late = || {
        options
            .time_limit()
            .is_some_and(|limit| start.elapsed() > limit)
    };
    let mut lanes: Vec<Lane> = options
        .settings
        .iter()
        .map(|&setting| Lane::open::<B>(setting, options, device))
        .collect();

    for round in 0..options.warmup() {
        if round > 0 && is_late() {
            break;
        }
        in_turn(&mut lanes, round, Lane::warm_up);
    }
    for round in 0..options.steps() {
        if round >= FEWEST_ROUNDS && is_late() {
            break;
        }
        in_turn(&mut lanes, round, Lane::time);
    }

    let memory = match &mut lanes[..] {
        [alone] => alone.watch::<B>(options, device),
        _ => None,
    };
    report::<B>(options, device, lanes, memory)
}

/// One after the other, each round beginning with another: what follows on what is not always the same.
fn in_turn(lanes: &mut [Lane], round: usize, mut step: impl FnMut(&mut Lane)) {
    let first = round % lanes.len();
    let (later, earlier) = lanes.split_at_mut(first);
    earlier.iter_mut().chain(later).for_each(&mut step);
}

/// One setting on its way through the rounds.
struct Lane {
    setting: Setting,
    state: State,
    first_step: Option<Duration>,
    step_milliseconds: Vec<f64>,
    loss: f64,
}

enum State {
    Running(Box<dyn Contender>),
    /// Never started, or fell out.
    Out(Outcome),
}

impl Lane {
    fn open<B: Backend>(setting: Setting, options: &Options, device: &B::Device) -> Self {
        let start = || contender::<B>(setting, &options.workload(), options.seed, device);
        let state = match guarded(start) {
            Ok(Ok(contender)) => State::Running(contender),
            Ok(Err(error)) => State::Out(Outcome::Refused(error.to_string())),
            Err(panic) => State::Out(Outcome::Failed(panic)),
        };
        Self {
            setting,
            state,
            first_step: None,
            step_milliseconds: Vec::new(),
            loss: f64::NAN,
        }
    }

    /// The time that a step took, and its loss.
    fn step(&mut self) -> Option<(Duration, f64)> {
        let State::Running(contender) = &mut self.state else {
            return None;
        };
        contender.enter();
        let start = Instant::now();
        let outcome = match guarded(|| contender.step()) {
            Ok(Ok(loss)) => return Some((start.elapsed(), loss)),
            Ok(Err(error)) => Outcome::Failed(error.to_string()),
            Err(panic) => Outcome::Failed(panic),
        };
        self.state = State::Out(outcome);
        None
    }

    fn warm_up(&mut self) {
        let step = self.step();
        if let (None, Some((time, _))) = (self.first_step, step) {
            self.first_step = Some(time);
            let seconds = time.as_secs_f64();
            eprintln!("{}: first step after {seconds:.1} s", self.setting.name());
        }
    }

    fn time(&mut self) {
        if let Some((time, loss)) = self.step() {
            self.step_milliseconds.push(1e3 * time.as_secs_f64());
            self.loss = loss;
        }
    }

    fn watch<B: Backend>(&mut self, options: &Options, device: &B::Device) -> Option<Memory> {
        // What compilation and the choice of kernels have left behind.
        B::memory_cleanup(device);
        peak_during(options.backend, || {
            for _ in 0..MEMORY_STEPS {
                self.step();
            }
        })
    }
}

fn report<B: Backend>(
    options: &Options,
    device: &B::Device,
    lanes: Vec<Lane>,
    memory: Option<Memory>,
) -> BenchReport {
    let workload = options.workload();
    let reference = lanes
        .iter()
        .find(|lane| matches!(lane.state, State::Running(_)))
        .map(|lane| (lane.setting, lane.step_milliseconds.clone()));
    let mut parameters = None;
    let results = lanes.into_iter().map(|lane| {
        let setting = lane.setting.name().to_owned();
        let contender = match lane.state {
            State::Running(contender) => contender,
            State::Out(outcome) => return SettingResult { setting, outcome },
        };
        parameters = Some(contender.parameters());
        let milliseconds = Quartiles::of(lane.step_milliseconds.iter().copied());
        let ratio = reference
            .as_ref()
            .map(|(_, times)| Quartiles::of_ratios(&lane.step_milliseconds, times));
        let outcome = Outcome::Measured(Figures {
            milliseconds,
            ratio,
            tokens_per_second: 1e3 * workload.tokens() as f64 / milliseconds.median,
            loss: lane.loss,
            skipped_steps: contender.skipped_steps(),
            first_step_seconds: lane.first_step.map(|time| time.as_secs_f64()),
            memory,
            step_milliseconds: lane.step_milliseconds,
        });
        SettingResult { setting, outcome }
    });
    let results = results.collect();
    BenchReport {
        framework: "burn 0.21.0".into(),
        backend: B::name(device),
        device: format!("{device:?}"),
        optimized: !cfg!(debug_assertions),
        workload,
        parameters,
        reference: reference.map(|(setting, _)| setting.name().into()),
        results,
    }
}

/// A panic of one setting, most likely for want of memory, is not the end of the others.
fn guarded<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .map(String::as_str)
            .or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("a panic without a message").to_owned()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_flex::Flex;
    use clap::Parser;

    #[test]
    fn one_that_falls_out_does_not_stop_the_others() {
        struct Stumbles(usize);
        impl Contender for Stumbles {
            fn enter(&self) {}
            fn step(&mut self) -> Result<f64, burn_amp::AmpError> {
                self.0 -= 1;
                assert!(self.0 > 0, "out of memory");
                Ok(1.0)
            }
            fn skipped_steps(&self) -> u64 {
                0
            }
            fn parameters(&self) -> usize {
                7
            }
        }
        let lane = |steps| Lane {
            setting: Setting::Off,
            state: State::Running(Box::new(Stumbles(steps))),
            first_step: None,
            step_milliseconds: Vec::new(),
            loss: 0.0,
        };
        let mut lanes = vec![lane(2), lane(9)];
        for round in 0..3 {
            in_turn(&mut lanes, round, Lane::time);
        }
        let report = report::<Flex>(
            &Options::parse_from(["bench"]),
            &Default::default(),
            lanes,
            None,
        );
        assert_eq!(
            report.results[0].outcome,
            Outcome::Failed("out of memory".into())
        );
        assert_eq!(report.measured().count(), 1);
        assert_eq!(report.parameters, Some(7));
    }
}
