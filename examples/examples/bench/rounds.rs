//! The steps of all settings, in turn.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use burn::prelude::Backend;
use burn_amp::AmpError;

use super::options::Options;
use super::report::{BenchReport, Figures, Outcome, SettingResult};
use super::statistics::Quartiles;
use super::torch::{self, Torch};
use super::trainer::{Contender, Look, Task, contender};

/// Rounds that are timed even after the time limit.
const FEWEST_ROUNDS: usize = 3;

/// Times the settings against each other. Their memory, and whether they compute the same, is
/// measured afterwards.
pub fn race<B: Backend>(options: &Options, device: &B::Device) -> BenchReport {
    let start = Instant::now();
    let is_late = || {
        options
            .time_limit()
            .is_some_and(|limit| start.elapsed() > limit)
    };
    let task = Task::<B> {
        workload: options.workload(),
        seed: options.seed,
        device: device.clone(),
        backend: options.backend,
    };
    let mut lanes: Vec<Lane> = options
        .settings
        .iter()
        .map(|&setting| Lane::open(setting.to_string(), || contender(setting, &task)))
        .collect();
    if let Some(script) = &options.torch {
        let mut names: Vec<_> = options
            .settings
            .iter()
            .copied()
            .filter_map(torch::name)
            .collect();
        names.dedup();
        lanes.extend(names.into_iter().map(|name| {
            Lane::open(format!("torch {name}"), || {
                Ok(Box::new(Torch::start(script, &name, &task)))
            })
        }));
    }

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

    lanes.iter_mut().for_each(Lane::look);
    report::<B>(options, device, lanes)
}

/// Steps one lane after the other. Each round starts with another lane, so that the order varies.
fn in_turn(lanes: &mut [Lane], round: usize, mut step: impl FnMut(&mut Lane)) {
    let first = round % lanes.len();
    let (later, earlier) = lanes.split_at_mut(first);
    earlier.iter_mut().chain(later).for_each(&mut step);
}

/// One setting on its way through the rounds.
struct Lane {
    setting: String,
    state: State,
    first_step: Option<Duration>,
    step_milliseconds: Vec<f64>,
    /// Losses of the steps that were timed.
    losses: Vec<f64>,
    look: Option<Look>,
}

enum State {
    Running(Box<dyn Contender>),
    /// It could not start, or a step failed.
    Out(Outcome),
}

impl Lane {
    fn open(
        setting: String,
        contender: impl FnOnce() -> Result<Box<dyn Contender>, AmpError>,
    ) -> Self {
        let state = match guarded(contender) {
            Ok(Ok(contender)) => State::Running(contender),
            Ok(Err(error)) => State::Out(Outcome::Refused(error.to_string())),
            Err(panic) => State::Out(Outcome::Failed(panic)),
        };
        Self {
            setting,
            state,
            first_step: None,
            step_milliseconds: Vec::new(),
            losses: Vec::new(),
            look: None,
        }
    }

    /// Runs `work` on the contender; after a failure the setting takes no further steps.
    fn go<T>(&mut self, work: impl FnOnce(&mut dyn Contender) -> Result<T, AmpError>) -> Option<T> {
        let State::Running(contender) = &mut self.state else {
            return None;
        };
        contender.enter();
        let outcome = match guarded(|| work(&mut **contender)) {
            Ok(Ok(done)) => return Some(done),
            Ok(Err(error)) => Outcome::Failed(error.to_string()),
            Err(panic) => Outcome::Failed(panic),
        };
        self.state = State::Out(outcome);
        None
    }

    /// The time that a step took, and its loss.
    fn step(&mut self) -> Option<(Duration, f64)> {
        self.go(|contender| {
            let start = Instant::now();
            let loss = contender.step()?;
            Ok((start.elapsed(), loss))
        })
    }

    fn warm_up(&mut self) {
        let step = self.step();
        if let (None, Some((time, _))) = (self.first_step, step) {
            self.first_step = Some(time);
            let seconds = time.as_secs_f64();
            eprintln!("{}: first step after {seconds:.1} s", self.setting);
        }
    }

    fn time(&mut self) {
        if let Some((time, loss)) = self.step() {
            self.step_milliseconds.push(1e3 * time.as_secs_f64());
            self.losses.push(loss);
        }
    }

    fn look(&mut self) {
        self.look = self.go(|contender| contender.look());
    }

    /// Whether every loss, and every gradient of the step that was looked at, has the bits of the
    /// other's.
    fn is_same(&self, other: &Evidence) -> Option<bool> {
        let gradients = self.look?.gradients?;
        let pairs = || self.losses.iter().zip(&other.losses);
        let losses = pairs().all(|(one, other)| one.to_bits() == other.to_bits());
        Some(losses && gradients == other.gradients?)
    }
}

/// The losses and gradients that others are compared with.
struct Evidence {
    setting: String,
    step_milliseconds: Vec<f64>,
    losses: Vec<f64>,
    gradients: Option<u64>,
}

fn report<B: Backend>(options: &Options, device: &B::Device, lanes: Vec<Lane>) -> BenchReport {
    let workload = options.workload();
    let reference = lanes
        .iter()
        .find(|lane| matches!(lane.state, State::Running(_)))
        .map(|lane| Evidence {
            setting: lane.setting.clone(),
            step_milliseconds: lane.step_milliseconds.clone(),
            losses: lane.losses.clone(),
            gradients: lane.look.and_then(|look| look.gradients),
        });
    let is_alone = lanes.len() == 1;
    let mut parameters = None;
    let results = lanes.into_iter().map(|lane| {
        let same_bits = reference.as_ref().and_then(|it| lane.is_same(it));
        let setting = lane.setting;
        let contender = match lane.state {
            State::Running(contender) => contender,
            State::Out(outcome) => return SettingResult { setting, outcome },
        };
        parameters = Some(contender.parameters());
        let milliseconds = Quartiles::of(lane.step_milliseconds.iter().copied());
        let ratio = reference
            .as_ref()
            .map(|it| Quartiles::of_ratios(&lane.step_milliseconds, &it.step_milliseconds));
        let look = lane.look.unwrap_or_default();
        let outcome = Outcome::Measured(Figures {
            milliseconds,
            ratio,
            tokens_per_second: 1e3 * workload.tokens() as f64 / milliseconds.median,
            loss: lane.losses.last().copied().unwrap_or(f64::NAN),
            skipped_steps: contender.skipped_steps(),
            first_step_seconds: lane.first_step.map(|time| time.as_secs_f64()),
            memory: look.watched.most.filter(|_| is_alone),
            step_bytes: look.watched.added_bytes,
            replayed_operations: look.replayed_operations,
            same_bits,
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
        reference: reference.map(|it| it.setting),
        results,
    }
}

/// Catches a panic of one setting, most likely out of memory, so that the others continue.
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
    use crate::tests::turn;
    use burn_flex::Flex;
    use clap::Parser;

    #[test]
    fn one_that_falls_out_does_not_stop_the_others() {
        let _turn = turn();
        struct Stumbles(usize);
        impl Contender for Stumbles {
            fn enter(&self) {}
            fn step(&mut self) -> Result<f64, AmpError> {
                self.0 -= 1;
                assert!(self.0 > 0, "out of memory");
                Ok(1.0)
            }
            fn look(&mut self) -> Result<Look, AmpError> {
                Ok(Look::default())
            }
            fn skipped_steps(&self) -> u64 {
                0
            }
            fn parameters(&self) -> usize {
                7
            }
        }
        let lane = |steps| Lane {
            setting: "off".into(),
            state: State::Running(Box::new(Stumbles(steps))),
            first_step: None,
            step_milliseconds: Vec::new(),
            losses: Vec::new(),
            look: None,
        };
        let mut lanes = vec![lane(2), lane(9)];
        for round in 0..3 {
            in_turn(&mut lanes, round, Lane::time);
        }
        let report = report::<Flex>(&Options::parse_from(["bench"]), &Default::default(), lanes);
        assert_eq!(
            report.results[0].outcome,
            Outcome::Failed("out of memory".into())
        );
        assert_eq!(report.measured().count(), 1);
        assert_eq!(report.parameters, Some(7));
    }
}
