//! Whole trainings of a tiny model, through everything that the example goes through.
//!
//! Burn's CPU backend draws all random numbers of a process from one generator, so two trainings at
//! once would disturb each other: the tests here take turns.

mod data;
mod job;
mod model;
mod options;
mod ranks;

use std::fs;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};

use burn::backend::Autodiff;
use burn::module::{Module, ModuleVisitor, Param};
use burn::prelude::*;
use burn::record::{FullPrecisionSettings, NamedMpkFileRecorder, Recorder};
use burn_flex::Flex;
use clap::Parser;
use examples::gpt::model::Gpt;
use examples::gpt::options::Options;
use examples::gpt::report::Report;
use examples::training::error::TrainingError;
use peak_alloc::PeakAlloc;

/// As in the example itself.
#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

static TURN: Mutex<()> = Mutex::new(());

fn turn() -> MutexGuard<'static, ()> {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A text with something to learn, and options that learn it in no time.
fn options(directory: &Path, more: &str) -> Options {
    let text = directory.join("text.txt");
    if !text.exists() {
        fs::write(
            &text,
            "the quick brown fox jumps over the lazy dog. ".repeat(60),
        )
        .unwrap();
    }
    let sized = more.contains("--effective-batch") || more.contains("--config");
    let batch = if sized { "" } else { "--batch 4" };
    let arguments = format!(
        "gpt --steps 12 --eval-every 4 {batch} --context 16 --layers 1 --heads 2 --width 16 --dropout 0.1 \
         --lr 1e-2 --text {} --output {}/run {more}",
        text.display(),
        directory.display(),
    );
    Options::parse_from(arguments.split_whitespace())
}

/// Trains; rank 0 is always here.
fn run(options: &Options) -> Result<Report, TrainingError> {
    examples::gpt::run(options).map(Option::unwrap)
}

/// The report without what is measured.
fn figures(report: &Report) -> Report {
    Report {
        tokens_per_second: 0.0,
        peak_bytes: None,
        ..report.clone()
    }
}

#[test]
fn activations_that_come_back_change_no_figure() {
    let _turn = turn();
    for precision in ["off", "f16"] {
        let report = |checkpoint: &str, layers: usize| {
            let directory = tempfile::tempdir().unwrap();
            let plot = directory.path().join("memory.svg");
            let more = format!(
                "--checkpoint {checkpoint} --amp {precision} --accum 2 --layers {layers} --memory-plot {}",
                plot.display()
            );
            let report = run(&options(directory.path(), &more)).unwrap();
            let svg = fs::read_to_string(plot).unwrap();
            let scopes = checkpoint != "none" && !checkpoint.contains("budget");
            // In the legend: the names of scopes are drawn where there is room.
            let named = svg.lines().any(|line| line == "scope");
            assert_eq!(named, scopes, "{checkpoint}");
            // The line at a budget's limit, a measured one too.
            let limit = checkpoint.contains("budget");
            assert_eq!(svg.contains("budget "), limit, "{checkpoint}");
            report
        };
        // A step of sixteen layers takes more than a mebibyte.
        let ways = [
            (
                2,
                ["block", "units", "keep-compute", "offload", "budget=40%"].as_slice(),
            ),
            (16, ["budget=1"].as_slice()),
        ];
        for (layers, checkpoints) in ways {
            let plain = report("none", layers);
            assert_eq!(plain.replayed_operations, 0);
            for checkpoint in checkpoints {
                let other = report(checkpoint, layers);
                assert_eq!(other.epochs, plain.epochs, "{precision}, {checkpoint}");
                let back = other.replayed_operations > 0 || other.uploaded_bytes > 0;
                assert!(back, "{precision}, {checkpoint}");
            }
        }
    }
}

#[test]
fn learns_and_reports() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let options = options(directory.path(), "--steps 40 --eval-every 20");
    let report = run(&options).unwrap();

    assert_eq!(report.steps, 40);
    assert_eq!(report.epochs.len(), 2);
    assert!(report.valid_loss < 5.0, "{report:?}");
    assert!(
        report.epochs[1].valid < report.epochs[0].valid,
        "{report:?}"
    );
    assert!(report.tokens_per_second > 0.0);
    assert_eq!(
        (report.skipped_steps, report.precision.as_str()),
        (0, "f32")
    );

    let table = report.to_string();
    let loss = format!("validation loss       {:.4} nats/byte\n", report.valid_loss);
    assert!(table.contains(&loss), "{table}");
    let end = "skipped micro-batches 0 of 40\neffective batch       4 = 4 x 1 x 1\nupdates               40\n\
               operations replayed   0\n";
    assert!(table.ends_with(end), "{table}");
    assert_eq!(report.peak_bytes.is_some(), cfg!(target_os = "linux"));
    assert!(report.peak_bytes.is_none_or(|bytes| bytes > 1 << 20));
    let curves = options.output.join("tensorboard");
    for split in ["train", "valid"] {
        let mut files = fs::read_dir(curves.join(split)).unwrap();
        assert!(files.next().is_some(), "{split}");
    }
    let written = fs::read(options.output.join("report.json")).unwrap();
    let read: Report = serde_json::from_slice(&written).unwrap();
    // JSON may be read one unit in the last place off.
    assert!((read.tokens_per_second / report.tokens_per_second - 1.0).abs() < 1e-12);
    assert_eq!(figures(&read), figures(&report));
}

#[test]
fn mixed_precision_follows_full_precision() {
    let _turn = turn();
    let in_precision = |amp| {
        let directory = tempfile::tempdir().unwrap();
        let more = format!("--amp {amp} --steps 40 --eval-every 20");
        let report = run(&options(directory.path(), &more)).unwrap();
        let metrics = directory.path().join("run/train/epoch-1");
        assert_eq!(metrics.join("Loss_Scale.log").exists(), amp == "f16");
        report
    };
    let full = in_precision("off");
    for amp in ["bf16", "f16"] {
        let mixed = in_precision(amp);
        assert_eq!(mixed.precision, amp);
        let distance = (mixed.valid_loss / full.valid_loss - 1.0).abs();
        assert!(distance < 0.02, "{amp}: {distance}");
        assert_ne!(mixed.valid_loss, full.valid_loss);
    }
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let _turn = turn();
    let with = |more: &str| {
        let directory = tempfile::tempdir().unwrap();
        run(&options(directory.path(), more)).unwrap()
    };
    let one = with("");
    assert_eq!(figures(&one), figures(&with("")));
    assert_ne!(one.train_loss, with("--seed 7").train_loss);
}

/// Trains in full, then again from the record before the last epoch.
fn resume(directory: &Path, more: &str) {
    let whole = run(&options(directory, more)).unwrap();

    // As a run that was killed while it wrote its last record leaves it.
    let records = directory.join("run/checkpoint");
    let model = records.join("model-3.mpk");
    let record = fs::read(&model).unwrap();
    fs::write(&model, &record[..record.len() / 2]).unwrap();
    let first_epoch = fs::read(directory.join("run/train/epoch-1/Loss.log")).unwrap();

    let resumed = run(&options(directory, &format!("{more} --resume"))).unwrap();
    assert_eq!(resumed.epochs, whole.epochs[2..]);
    let resumed = Report {
        epochs: whole.epochs.clone(),
        ..resumed
    };
    assert_eq!(figures(&resumed), figures(&whole));
    assert_eq!(
        fs::read(directory.join("run/train/epoch-1/Loss.log")).unwrap(),
        first_epoch,
        "the metrics before the break are still there"
    );
}

#[test]
fn a_resumed_run_ends_like_one_without_a_break() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    resume(directory.path(), "--amp f16 --batch 2 --accum 3");
    resume(directory.path(), "--amp f16");

    let error = |more| {
        run(&options(directory.path(), more))
            .unwrap_err()
            .to_string()
    };
    assert!(error("--resume --amp f16").starts_with("cannot resume: all 12 steps are in "));
    assert!(error("--resume").contains("\"--amp f16\": true, now \"--amp f16\": false"));
    let changed = error("--resume --amp f16 --batch 5 --lr 1e-3");
    for part in [
        r#""--lr": 0.01, now "--lr": 0.001"#,
        r#""sequences in an update": 4, now "sequences in an update": 5"#,
    ] {
        assert!(changed.contains(part), "{changed}");
    }
    let settings = directory.path().join("run/run.json");
    let whole = fs::read_to_string(&settings).unwrap();
    fs::write(&settings, "").unwrap();
    assert!(error("--resume --amp f16").contains("run.json is not whole"));
    let mut older: serde_json::Value = serde_json::from_str(&whole).unwrap();
    older.as_object_mut().unwrap().remove("records");
    fs::write(&settings, older.to_string()).unwrap();
    assert!(error("--resume --amp f16").contains("are of an older version of this program"));
    fs::write(&settings, whole).unwrap();
    fs::write(directory.path().join("text.txt"), "other ".repeat(600)).unwrap();
    let changed = error("--resume --amp f16");
    let part = r#""bytes of text": 2700, now "bytes of text": 3600"#;
    assert!(changed.contains(part), "{changed}");
}

/// The parameters after so many epochs, all in one.
fn parameters(options: &Options, epoch: usize) -> Vec<f32> {
    struct All(Vec<f32>);
    impl<B: Backend> ModuleVisitor<B> for All {
        fn visit_float<const D: usize>(&mut self, parameter: &Param<Tensor<B, D>>) {
            self.0.extend(parameter.val().into_data().iter::<f32>());
        }
    }
    let device = Default::default();
    let file = options.output.join(format!("checkpoint/model-{epoch}"));
    let record = NamedMpkFileRecorder::<FullPrecisionSettings>::default().load(file, &device);
    let model: Gpt<Autodiff<Flex>> = options.model().init(&device);
    let mut all = All(Vec::new());
    model.load_record(record.unwrap()).visit(&mut all);
    all.0
}

/// Parameters move by about 1e-2 an update here, and AdamW makes of the rounding of a small
/// gradient a part of that.
fn assert_same_parameters(one: &[f32], other: &[f32]) {
    assert_eq!(one.len(), other.len());
    let distances = one
        .iter()
        .zip(other)
        .map(|(one, other)| (one - other).abs());
    let farthest = distances.fold(0.0, f32::max);
    assert!(farthest < 1e-4, "{farthest}");
}

#[test]
fn a_window_is_one_larger_batch() {
    let _turn = turn();
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let [one, many] = ["--batch 8", "--batch 2 --accum 4"];
    let one = options(directories[0].path(), &format!("--dropout 0 {one}"));
    let many = options(directories[1].path(), &format!("--dropout 0 {many}"));
    let (whole, windows) = (run(&one).unwrap(), run(&many).unwrap());

    assert_eq!((whole.updates, windows.updates), (12, 12));
    assert_eq!(
        (windows.micro_batch, windows.window, windows.effective_batch),
        (2, 4, 8)
    );
    assert!((whole.valid_loss - windows.valid_loss).abs() < 1e-4);
    assert_same_parameters(&parameters(&one, 3), &parameters(&many, 3));
}

#[test]
fn a_run_can_go_on_in_smaller_batches() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let start = options(directory.path(), "--dropout 0");
    let whole = run(&start).unwrap();
    let expected = parameters(&start, 3);
    for name in ["model", "optim", "scheduler"] {
        fs::remove_file(start.output.join(format!("checkpoint/{name}-3.mpk"))).unwrap();
    }
    let with = |more| run(&options(directory.path(), more));
    let error = with("--dropout 0 --resume --batch 2 --accum 3").unwrap_err();
    let error = error.to_string();
    assert!(
        error.contains(r#""sequences in an update": 4, now "sequences in an update": 6"#),
        "{error}"
    );

    let resumed = with("--dropout 0 --resume --batch 1 --accum 4").unwrap();
    assert_eq!((resumed.updates, resumed.window), (12, 4));
    assert!((whole.valid_loss - resumed.valid_loss).abs() < 1e-4);
    assert_same_parameters(&expected, &parameters(&start, 3));
}

#[test]
fn an_effective_batch_fits_into_the_memory() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let more = "--dropout 0 --context 64 --width 32 --effective-batch 24";
    let with = |limit: u64| {
        run(&options(
            directory.path(),
            &format!("{more} --memory-limit {limit}"),
        ))
    };

    let error = with(1).unwrap_err().to_string();
    assert!(error.starts_with("no micro-batch for --effective-batch: a micro-batch of one needs "));
    assert!(!directory.path().join("run").exists());

    let needed: u64 = error
        .split("raise the limit to ")
        .nth(1)
        .unwrap()
        .split(' ')
        .next()
        .unwrap()
        .parse()
        .unwrap();
    let limit = needed.div_ceil(1 << 20) + 8;
    let report = with(limit).unwrap();
    let found = report.found.unwrap();
    assert!((2..24).contains(&report.micro_batch), "{found}");
    // It begins where the estimate says.
    assert!(found.trials.len() <= 3, "{found}");
    println!("{found}");
    assert_eq!(report.micro_batch * report.window, 24);
    assert!(found.peak_bytes <= found.search.usable_bytes());

    // The whole run, with its records and validations, and without the trials.
    let more = format!(
        "--dropout 0 --context 64 --width 32 --batch {} --accum {}",
        report.micro_batch, report.window
    );
    HEAP.reset_peak_usage();
    let again = run(&options(directory.path(), &more)).unwrap();
    assert!(HEAP.peak_usage() as u64 <= limit << 20);
    assert_eq!(again.valid_loss, report.valid_loss);
}

#[test]
fn what_cannot_run_is_refused_before_it_starts() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let error = |more| {
        run(&options(directory.path(), more))
            .unwrap_err()
            .to_string()
    };

    assert!(error("--resume").starts_with("cannot resume: there is no complete record in "));
    assert!(error("--context 300").starts_with("the text is too short: 2700 bytes leave "));
    assert!(error("--width 15").starts_with("--heads 2 does not divide --width 15"));
    #[cfg(not(feature = "cuda"))]
    assert!(error("--backend cuda").ends_with(
        "cargo run --release -p examples --features cuda --example gpt -- --backend cuda"
    ));
    assert!(!directory.path().join("run").exists());
}
