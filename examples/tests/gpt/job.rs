//! The settings of a run, from the command line and DeepSpeed's file.

use std::fs;
use std::path::Path;

use burn::lr_scheduler::LrScheduler;
use burn_amp::GradScalerConfig;
use burn_zero::{HostAdamWConfig, Memory, Stage};
use clap::Parser;
use examples::gpt::job::Job;
use examples::gpt::options::Options;
use examples::training::precision::Amp;

fn settle(file: &str, arguments: &str, ranks: usize) -> Result<Job, String> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ds_config.json");
    fs::write(&path, file).unwrap();
    let path = path.display().to_string();
    let arguments = ["gpt", "--config", &path]
        .into_iter()
        .chain(arguments.split_whitespace());
    Job::new(&Options::parse_from(arguments), ranks)
        .map_err(|error| error.to_string().replace(&path, "FILE"))
}

fn of_options(arguments: &str) -> (Options, Job) {
    let arguments = ["gpt"].into_iter().chain(arguments.split_whitespace());
    let options = Options::parse_from(arguments);
    let job = Job::new(&options, options.memory.ranks.unwrap_or(1)).unwrap();
    (options, job)
}

#[test]
fn the_file_users_bring_is_said_at_the_start() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ds_config.json");
    let file = fs::read_to_string(file).unwrap();
    let job = settle(&file, "", 4).unwrap();
    let begin = "\
ZeRO stage 2 (optimizer state and gradients sharded) over 4 ranks
  batch              64 = 16 a micro-batch x 1 accumulated x 4 ranks
  precision          f16, losses times 65536 at first
  gradient clipping  to a global norm of 1
  parameters         on the device
  AdamW's state      in host memory
  ignored            zero_optimization.offload_optimizer.pin_memory: transfers";
    assert!(job.to_string().starts_with(begin), "{job}");
}

#[test]
fn without_a_file_the_options_count() {
    let (_, plain) = of_options("");
    assert_eq!((plain.batch.train, plain.lr), (16, 2e-3));
    assert_eq!(plain.config.zero.gradient_clipping, Some(1.0));
    let (_, given) =
        of_options("--zero 2 --batch 4 --accum 3 --amp f16 --offload --lr 0.1 --ranks 2");
    assert_eq!(given.batch.train, 24);
    assert_eq!(given.config.zero.stage, Stage::Gradients);
    assert_eq!(given.config.zero.offload_optimizer, Memory::Host);
    assert_eq!(given.lr, 0.1);
    // PyTorch's scaler, as burn-amp's.
    let scaler = GradScalerConfig::default();
    assert_eq!(
        (given.amp, given.config.precision.scaler()),
        (Amp::F16, scaler)
    );
}

#[test]
fn what_the_file_says_counts_where_no_option_does() {
    let file = r#"{"train_batch_size": 64, "gradient_accumulation_steps": 4, "fp16": {"enabled": true, "loss_scale": 128},
        "zero_optimization": {"stage": 1}, "gradient_clipping": 0,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}}}"#;
    let job = settle(file, "", 2).unwrap();
    assert_eq!((job.batch.micro, job.batch.steps), (8, 4));
    assert_eq!(
        (job.lr, job.config.adamw.as_ref().unwrap().weight_decay),
        (0.5, 0.0)
    );
    assert_eq!(job.config.zero.stage, Stage::OptimizerState);
    assert_eq!(job.config.zero.gradient_clipping, None);
    let scaler = GradScalerConfig::fixed(128.0);
    assert_eq!(
        (job.amp, job.config.precision.scaler()),
        (Amp::F16, scaler.clone())
    );

    let job = settle(file, "--zero 2 --lr 0.25 --amp f16", 2).unwrap();
    assert_eq!((job.config.zero.stage, job.lr), (Stage::Gradients, 0.25));
    assert_eq!(
        job.config.precision.scaler(),
        scaler,
        "the file's, of the same precision"
    );
    let job = settle(file, "--amp bf16", 2).unwrap();
    let scaler = GradScalerConfig::disabled();
    assert_eq!(
        (job.amp, job.config.precision.scaler()),
        (Amp::Bf16, scaler)
    );

    let scheduled = settle(r#"{"scheduler": {"type": "WarmupLR"}}"#, "", 2).unwrap_err();
    assert!(
        scheduled.starts_with("FILE: scheduler: this program warms the learning rate up"),
        "{scheduled}"
    );

    let filled = settle(r#"{"train_batch_size": 64}"#, "--batch 8", 2).unwrap();
    assert_eq!(filled.batch.steps, 4);
    assert_eq!(settle("{}", "", 3).unwrap().batch.train, 48);
}

#[test]
fn the_options_and_the_model_fill_auto_in() {
    let file = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}}"#;
    let options = "--amp bf16 --lr 0.5 --batch 2 --accum 3 --warmup 4 --steps 12 --width 32";
    let job = settle(file, options, 2).unwrap();
    assert_eq!((job.batch.train, job.lr, job.amp), (12, 0.5, Amp::Bf16));
    assert_eq!(job.config.zero.gradient_clipping, Some(1.0));
    assert_eq!(job.config.zero.reduce_bucket_size, 32 * 32);
    let adamw = HostAdamWConfig {
        beta_2: 0.95,
        ..HostAdamWConfig::default()
    };
    assert_eq!(job.config.adamw, Some(adamw));
    // The defaults of the options fill it in as well.
    let job = settle(file, "", 1).unwrap();
    assert_eq!((job.batch.train, job.lr, job.amp), (16, 2e-3, Amp::Off));
}

#[test]
fn what_cannot_be_is_refused_with_the_numbers() {
    for (file, arguments, says) in [
        (
            "{}",
            "--effective-batch 32",
            "--effective-batch 32 is looked for on one rank, but there are 2: give --batch and --accum",
        ),
        (
            r#"{"train_batch_size": 64}"#,
            "--batch 5",
            "FILE: train_batch_size 64, but train_micro_batch_size_per_gpu 5 x gradient_accumulation_steps 6 x 2 ranks = 60",
        ),
        (
            r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}"#,
            "",
            "FILE: train_batch_size 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 x 2 ranks = 32",
        ),
    ] {
        assert_eq!(settle(file, arguments, 2).unwrap_err(), says);
    }
}

#[test]
fn the_learning_rate_rises_in_a_line_and_falls_along_a_cosine_to_a_tenth() {
    let rates = |arguments: &str| {
        let (options, job) = of_options(arguments);
        let mut schedule = job.schedule(&options).unwrap();
        let rates = (0..options.steps).map(|_| schedule.step());
        rates.collect::<Vec<_>>()
    };
    let rates_with = rates("--steps 100 --warmup 9 --lr 0.5");
    assert!((rates_with[0] / 0.05 - 1.0).abs() < 1e-9, "{rates_with:?}");
    assert!(rates_with[..10].is_sorted(), "{rates_with:?}");
    assert!(rates_with[9..].is_sorted_by(|one, next| one >= next));
    assert!(rates_with[9] > 0.48 && rates_with[99] < 0.0502);
    let rates_without = rates("--steps 4 --warmup 0 --lr 0.5");
    assert_eq!(rates_without[0], 0.5);

    let job = settle(
        r#"{"optimizer": {"type": "AdamW", "params": {"lr": 3}}}"#,
        "",
        1,
    );
    let refused = job.unwrap().schedule(&of_options("").0).err().unwrap();
    assert!(refused.to_string().starts_with("learning rate 3: "));
}
