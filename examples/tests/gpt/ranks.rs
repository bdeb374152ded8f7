//! Several ranks, DeepSpeed's configuration and offload.

use std::fs;
use std::path::Path;

use clap::Parser;
use examples::gpt::log::EpochLosses;
use examples::gpt::options::Options;
use examples::gpt::report::Report;

use super::{assert_same_parameters, options, parameters, run, turn};

/// The losses of the first updates, an epoch each, and what is left at the end.
fn losses(more: &str) -> (Vec<EpochLosses>, Report) {
    let directory = tempfile::tempdir().unwrap();
    let more = format!("--steps 5 --eval-every 1 --dropout 0 {more}");
    let report = run(&options(directory.path(), &more)).unwrap();
    (report.epochs.clone(), report)
}

/// Whether losses are the same to the rounding of what they are computed in.
#[track_caller]
fn assert_follow(one: &[EpochLosses], other: &[EpochLosses], tolerance: f64) {
    assert_eq!((one.len(), other.len()), (5, 5));
    for (one, other) in one.iter().zip(other) {
        let distance = |one: f64, other: f64| {
            assert!((one / other - 1.0).abs() < tolerance, "{one} or {other}");
        };
        distance(one.train, other.train);
        distance(one.valid, other.valid);
    }
}

/// f32 sums in another order, and what AdamW makes of that in five updates.
const F32_ROUNDING: f64 = 2e-6;

/// Gradients of each rank are rounded to bf16, eight bits, before they are added.
const BF16_ROUNDING: f64 = 2e-3;

#[test]
fn ranks_follow_one_with_their_whole_batch() {
    let _turn = turn();
    for (more, tolerance) in [
        ("", F32_ROUNDING),
        ("--accum 2", F32_ROUNDING),
        ("--checkpoint block", F32_ROUNDING),
        ("--checkpoint units --layers 2 --loss chunked", F32_ROUNDING),
        ("--amp bf16", BF16_ROUNDING),
        ("--amp f16 --accum 2 --checkpoint block", BF16_ROUNDING),
    ] {
        let (one, alone) = losses(&format!("--batch 8 {more}"));
        let stages =
            [0, 1, 2, 3].map(|stage| losses(&format!("--batch 4 --ranks 2 --zero {stage} {more}")));
        for (stage, (losses, report)) in stages.iter().enumerate() {
            assert_follow(&one, losses, tolerance);
            // Stages 2 and 3 add ranks up before micro-batches, the others after them.
            let same = match stage {
                3 => &stages[2],
                2 if more.contains("--accum") => &stages[2],
                _ => &stages[0],
            };
            assert_eq!(losses, &same.0, "stage {stage}, {more}");
            assert_eq!(report.sample, same.1.sample);
            assert_eq!(report.effective_batch, alone.effective_batch);
            assert_eq!((report.updates, report.ranks), (5, 2));
        }
    }
}

#[test]
fn dropout_on_ranks_is_the_same_in_every_run() {
    let _turn = turn();
    let losses = |more: &str| {
        let directory = tempfile::tempdir().unwrap();
        let more = format!("--steps 5 --eval-every 1 --batch 4 --ranks 3 --dropout 0.2 {more}");
        run(&options(directory.path(), &more)).unwrap().epochs
    };
    let first = losses("--zero 2");
    for stage in ["--zero 0", "--zero 1", "--zero 2", "--zero 3"] {
        assert_eq!(losses(stage), first, "{stage}");
    }
    assert_ne!(losses("--zero 2 --dropout 0.3"), first);
}

#[test]
fn deepspeeds_file_runs_unmodified() {
    let _turn = turn();
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ds_config.json");
    let more = format!("--config {} --steps 3", file.display());
    for (ranks, micro_batch) in [(1, 64), (2, 32)] {
        let directory = tempfile::tempdir().unwrap();
        let options = options(directory.path(), &format!("{more} --ranks {ranks}"));
        let report = run(&options).unwrap();
        assert_eq!(
            (report.effective_batch, report.micro_batch),
            (64, micro_batch)
        );
        assert_eq!((report.stage, report.precision.as_str()), (2, "f16"));
        assert_eq!(report.ranks, ranks);
        assert_eq!(report.estimate.optimizer_bytes, 0, "nothing on the device");
        assert!(report.valid_loss < 6.0);
    }
}

#[test]
fn every_section_of_a_file_is_followed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let [device, host] = ["none", "cpu"].map(|place| {
        let file = directory.path().join("ds_config.json");
        let json = r#"{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
            "bf16": {"enabled": true}, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1e3,
            "offload_optimizer": {"device": "PLACE"}},
            "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.9]}}}"#;
        fs::write(&file, json.replace("PLACE", place)).unwrap();
        let text = options(directory.path(), "").text;
        let arguments = format!(
            "gpt --steps 12 --eval-every 4 --context 16 --layers 1 --heads 2 --width 16 --ranks 2 --warmup 4 --text {} --output {}/run --config {}",
            text[0].display(),
            directory.path().display(),
            file.display()
        );
        run(&Options::parse_from(arguments.split_whitespace())).unwrap()
    });
    assert_eq!((device.effective_batch, device.window), (8, 2));
    assert_eq!((device.precision.as_str(), device.stage), ("bf16", 1));
    assert!(device.estimate.optimizer_bytes > 0 && host.estimate.optimizer_bytes == 0);
    assert!((device.valid_loss / host.valid_loss - 1.0).abs() < BF16_ROUNDING);
    let rates = fs::read_to_string(directory.path().join("run/train/epoch-1/Learning_Rate.log"));
    // A fifth of the file's rate after the first of five steps of the warm-up.
    assert!(rates.unwrap().starts_with("0.004"));
}

#[test]
fn a_state_on_the_host_changes_little() {
    let _turn = turn();
    let (device, _) = losses("--batch 8");
    let (host, report) = losses("--batch 8 --offload");
    // Burn and PyTorch order AdamW's operations differently.
    assert_follow(&device, &host, 1e-4);
    assert!(report.estimate.host_bytes > 0);
    let (ranks, _) = losses("--batch 4 --ranks 2 --zero 2 --offload");
    assert_follow(&host, &ranks, F32_ROUNDING);
}

#[test]
fn parameters_in_host_memory_change_no_bit() {
    let _turn = turn();
    for more in ["", "--offload", "--amp f16 --accum 2 --checkpoint block"] {
        let (device, plain) = losses(&format!("--batch 8 {more}"));
        let (host, report) = losses(&format!("--batch 8 {more} --zero 3 --offload-param"));
        assert_eq!(device, host, "{more}");
        assert_eq!(plain.sample, report.sample, "{more}");
        assert_eq!(report.stage, 3);
        let bytes = |report: &Report| report.estimate.parameter_bytes;
        assert!(bytes(&report) < bytes(&plain));
        let all = report.estimate.host_parameter_bytes;
        assert_eq!(all, bytes(&plain), "all of them in host memory");
    }
}

#[test]
fn deepspeeds_files_of_stage_3_train() {
    let _turn = turn();
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../burn-zero/tests/config/files");
    for (name, on_host) in [
        ("accelerate_stage_3", false),
        ("accelerate_stage_3_offload", true),
        ("transformers_stage_3", true),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let file = fs::read_to_string(files.join(name).with_extension("json")).unwrap();
        // The program has a schedule of its own.
        let mut file: serde_json::Value = serde_json::from_str(&file).unwrap();
        file.as_object_mut().unwrap().remove("scheduler");
        let path = directory.path().join("ds_config.json");
        fs::write(&path, file.to_string()).unwrap();
        for ranks in [1, 2] {
            let more = format!("--batch 4 --ranks {ranks} --config {}", path.display());
            let report = run(&options(directory.path(), &more)).unwrap();
            assert_eq!((report.stage, report.ranks), (3, ranks), "{name}");
            let on_host = (on_host || ranks > 1, on_host);
            assert_eq!(
                report.estimate.host_parameter_bytes > 0,
                on_host.0,
                "{name}"
            );
            assert_eq!(report.estimate.optimizer_bytes == 0, on_host.1, "{name}");
            assert!(report.valid_loss < 6.0, "{name}");
        }
    }
}

#[test]
fn a_run_goes_on_with_another_number_of_ranks() {
    let _turn = turn();
    for (first, then) in [(2, 1), (1, 2), (2, 2), (3, 2)] {
        let directory = tempfile::tempdir().unwrap();
        let with = |ranks: usize| {
            let batch = 12 / ranks;
            format!("--dropout 0 --batch {batch} --ranks {ranks} --zero 2 --amp f16")
        };
        let start = options(directory.path(), &with(first));
        let whole = run(&start).unwrap();
        let expected = parameters(&start, 3);
        for name in ["model", "optim", "scheduler"] {
            fs::remove_file(start.output.join(format!("checkpoint/{name}-3.mpk"))).unwrap();
        }
        let resumed = options(directory.path(), &format!("{} --resume", with(then)));
        let resumed = run(&resumed).unwrap();
        if first == then {
            assert_eq!(resumed.epochs, whole.epochs[2..]);
            assert_eq!(parameters(&start, 3), expected);
        } else {
            let distance = (resumed.valid_loss / whole.valid_loss - 1.0).abs();
            assert!(distance < BF16_ROUNDING, "{first} to {then}: {distance}");
        }
        assert_eq!(resumed.updates, whole.updates);
    }
}

#[test]
fn a_run_goes_on_with_its_state_in_the_other_place() {
    let _turn = turn();
    let ranks = "--batch 4 --ranks 2 --zero 2";
    for (first, then) in [
        ("--batch 8".to_owned(), "--batch 8 --offload".to_owned()),
        ("--batch 8 --offload".to_owned(), "--batch 8".to_owned()),
        (format!("{ranks} --offload"), "--batch 8".to_owned()),
        ("--batch 8".to_owned(), format!("{ranks} --offload")),
        (
            "--batch 8 --offload --offload-param".to_owned(),
            "--batch 8".to_owned(),
        ),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let start = options(directory.path(), &format!("--dropout 0 {first}"));
        let whole = run(&start).unwrap();
        let expected = parameters(&start, 3);
        for name in ["model", "optim", "scheduler"] {
            fs::remove_file(start.output.join(format!("checkpoint/{name}-3.mpk"))).unwrap();
        }
        let resumed = options(directory.path(), &format!("--dropout 0 {then} --resume"));
        let report = run(&resumed).unwrap();
        // A new state would be at its first step again, which is far larger.
        assert_same_parameters(&parameters(&start, 3), &expected);
        let distance = (report.valid_loss / whole.valid_loss - 1.0).abs();
        assert!(distance < 1e-4, "{first} to {then}: {distance}");
        assert_eq!(report.updates, whole.updates);
    }
}

#[test]
fn ranks_end_with_the_same_parameters_as_one() {
    let _turn = turn();
    let directories = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let one = options(directories[0].path(), "--dropout 0 --batch 6");
    let three = options(
        directories[1].path(),
        "--dropout 0 --batch 2 --ranks 3 --zero 1",
    );
    run(&one).unwrap();
    run(&three).unwrap();
    assert_same_parameters(&parameters(&one, 3), &parameters(&three, 3));
}

#[test]
fn what_ranks_cannot_do_is_refused_before_it_starts() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let error = |more: &str| {
        run(&options(directory.path(), more))
            .unwrap_err()
            .to_string()
    };
    let file = directory.path().join("ds_config.json");
    let with = |json: &str| {
        fs::write(&file, json).unwrap();
        error(&format!("--config {}", file.display())).replace(&file.display().to_string(), "FILE")
    };
    assert_eq!(
        with(r#"{"fp61": {}}"#),
        "FILE: fp61: there is no such key; the nearest is `fp16`"
    );
    assert!(error("--config missing.json").contains("`missing.json`"));
    assert!(!directory.path().join("run").exists());
}
