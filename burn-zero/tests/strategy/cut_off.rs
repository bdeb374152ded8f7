//! A process that ends because of a fault first finishes the records that it is writing.

use std::fs;
use std::hint::spin_loop;
use std::os::unix::process::parent_id;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use burn::lr_scheduler::LrScheduler;
use burn::record::{
    FileRecorder, FullPrecisionSettings, PrettyJsonFileRecorder, Recorder, RecorderError,
};
use burn::tensor::backend::Backend;
use burn::train::{Learner, SupervisedTraining};
use burn_zero::{GroupOptions, Stage};
use serde::{Serialize, de::DeserializeOwned};

use crate::child::{ended, is_child};
use crate::learner::MICRO_BATCH;
use crate::loader::loader;
use crate::model::{Model, rows};
use crate::watch::Watch;
use crate::{Z, adamw};

const DEADLINE: Duration = Duration::from_secs(2);
/// Longer than the deadline and the four that the others get to end.
const FILE: Duration = Duration::from_secs(12);

/// Leaves each file for a while with its first half.
#[derive(Clone, Debug, Default)]
struct Halves(PrettyJsonFileRecorder<FullPrecisionSettings>);

impl<B: Backend> Recorder<B> for Halves {
    type Settings = FullPrecisionSettings;
    type RecordArgs = PathBuf;
    type RecordOutput = ();
    type LoadArgs = PathBuf;

    fn save_item<I: Serialize>(&self, item: I, mut file: PathBuf) -> Result<(), RecorderError> {
        let text = serde_json::to_string(&item).unwrap();
        file.set_extension("json");
        fs::write(&file, &text[..text.len() / 2]).unwrap();
        thread::sleep(FILE);
        fs::write(&file, text).unwrap();
        Ok(())
    }

    fn load_item<I: DeserializeOwned>(&self, file: &mut PathBuf) -> Result<I, RecorderError> {
        Recorder::<B>::load_item(&self.0, file)
    }
}

impl<B: Backend> FileRecorder<B> for Halves {
    fn file_extension() -> &'static str {
        "json"
    }
}

/// Steps of a rank in an epoch.
const STEPS: usize = 2;

/// Which rank fails in the second epoch, and how.
#[derive(Clone)]
enum Fails {
    Rank0Hangs(usize),
    Rank1Panics(usize),
}

impl LrScheduler for Fails {
    type Record<B: Backend> = ();

    fn step(&mut self) -> f64 {
        let is_rank_1 = thread::current().name() == Some("rank 1");
        let (Self::Rank0Hangs(steps) | Self::Rank1Panics(steps)) = self;
        *steps += 1;
        if *steps > STEPS {
            match self {
                Self::Rank1Panics(_) if is_rank_1 => panic!("the schedule is over"),
                Self::Rank0Hangs(_) if !is_rank_1 => loop {
                    spin_loop();
                },
                _ => {}
            }
        }
        0.1
    }

    fn to_record<B: Backend>(&self) {}

    fn load_record<B: Backend>(self, (): ()) -> Self {
        self
    }
}

fn directory(parent: u32, case: &str) -> PathBuf {
    std::env::temp_dir().join(format!("burn-zero-cut-off-{parent}-{case}"))
}

fn train(fails: Fails, case: &str) {
    let options = GroupOptions::with_deadline(DEADLINE);
    let (watch, update) = (Watch::default(), adamw::<Z>(Stage::Gradients));
    let strategy = update.strategy().threads(2).with_options(options);
    SupervisedTraining::new(
        directory(parent_id(), case),
        loader(rows(0, 2 * STEPS * MICRO_BATCH), MICRO_BATCH),
        loader(rows(1000, 1006), MICRO_BATCH),
    )
    .num_epochs(2)
    .with_application_logger(None)
    .renderer(watch.renderer())
    .with_metric_logger(watch.logger())
    .with_file_checkpointer(Halves::default())
    .with_training_strategy(strategy.into())
    .launch(Learner::new(Model::<Z>::new(), update, fails));
}

#[test]
#[ignore = "a child of the next test"]
fn rank_1_panics() {
    if is_child() {
        train(Fails::Rank1Panics(0), "rank_1_panics");
    }
}

#[test]
#[ignore = "a child of the next test"]
fn rank_0_hangs() {
    if is_child() {
        train(Fails::Rank0Hangs(0), "rank_0_hangs");
    }
}

#[test]
fn records_that_are_being_written_are_finished() {
    // The two processes mostly wait, so they run at the same time.
    thread::scope(|scope| {
        for case in ["rank_1_panics", "rank_0_hangs"] {
            scope.spawn(move || is_finished(case));
        }
    });
}

fn is_finished(case: &str) {
    let (status, text) = ended(&format!("cut_off::{case}"), Duration::from_secs(120));
    let directory = directory(std::process::id(), case);
    for name in ["model", "optim", "scheduler"] {
        let file = directory.join(format!("checkpoint/{name}-1.json"));
        let written = fs::read_to_string(&file).unwrap_or_else(|error| {
            panic!("{case}: {name}: {error}: {text}");
        });
        let read = serde_json::from_str::<serde_json::Value>(&written);
        assert!(read.is_ok(), "{case}: {name}: {read:?}: {text}");
    }
    // By the fault, or by the panic of a rank that has waited for its files.
    assert!(
        matches!(status, Some(1 | 101)),
        "{case}: {status:?}: {text}"
    );
    fs::remove_dir_all(directory).unwrap();
}
