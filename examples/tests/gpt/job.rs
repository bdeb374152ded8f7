//! What the sections of DeepSpeed's file mean that burn-zero leaves to the program, by DeepSpeed 0.19.8.

use std::fs;
use std::path::Path;

use burn_amp::GradScalerConfig;
use burn_zero::{ConfigError, Stage, ZeroConfig};
use examples::gpt::job::{AutoValues, Job, JobConfig};
use examples::gpt::optimizer::{AdamParams, OptimizerConfig};
use examples::gpt::options::Amp;
use examples::gpt::scheduler::{SchedulerConfig, Warmup, WarmupShape};
use serde_json::{Value, json};

/// The program's values for `"auto"`.
fn auto(amp: Amp) -> AutoValues {
    AutoValues {
        amp,
        adam: AdamParams {
            lr: 0.02,
            betas: (0.8, 0.9),
            eps: 1e-6,
            weight_decay: 0.3,
        },
        warmup_steps: 7,
        total_steps: 70,
        hidden_size: 100,
    }
}

fn try_read(json: &Value) -> Result<JobConfig, ConfigError> {
    JobConfig::read(&json.to_string(), &auto(Amp::F16))
}

fn read(json: Value) -> JobConfig {
    try_read(&json).unwrap()
}

fn deepspeeds_scaler() -> GradScalerConfig {
    GradScalerConfig {
        growth_interval: 1000,
        hysteresis: 2,
        ..GradScalerConfig::default()
    }
}

#[test]
fn the_file_users_bring_is_said_at_the_start() {
    let file =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/ds_config.json"));
    let config = JobConfig::read(&file.unwrap(), &auto(Amp::Off)).unwrap();
    assert_eq!(config.zero.stage, Stage::Gradients);
    assert_eq!(
        (config.amp, &config.scaler),
        (Amp::F16, &deepspeeds_scaler())
    );
    let batch = config.zero.batch.resolve(4).unwrap();
    assert_eq!(
        Job { config, batch }.to_string(),
        "\
ZeRO stage 2 (optimizer state and gradients sharded) over 4 ranks
  batch              64 = 16 a micro-batch x 1 accumulated x 4 ranks
  precision          f16 under autocast, f32 parameters, losses times 65536 at first, doubled after 1000 finite steps, halved \
at overflow 2, at least 1
  gradient clipping  to a global norm of 1
  optimizer state    in host memory
  communication      gradients during backward, in f32; 8388608 elements a bucket
  ignored            zero_optimization.offload_optimizer.pin_memory: transfers go through the backend's own buffers, and whether \
those are page-locked is its choice
  ignored            zero_optimization.offload_param: of stage 3, as in DeepSpeed
"
    );
}

#[test]
fn every_section_is_read() {
    let config = read(json!({
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
            "min_loss_scale": 2, "auto_cast": false, "consecutive_hysteresis": false},
        "bf16": {"enabled": false},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 5e2,
            "total_num_steps": 10000, "warmup_type": "linear"}},
    }));
    let scaler = GradScalerConfig {
        init_scale: 4096.0,
        growth_interval: 500,
        hysteresis: 3,
        min_scale: 2.0,
        ..GradScalerConfig::default()
    };
    assert_eq!((config.amp, config.scaler), (Amp::F16, scaler));
    let adam = AdamParams {
        lr: 3e-5,
        betas: (0.8, 0.99),
        eps: 1e-6,
        weight_decay: 0.1,
    };
    assert_eq!(config.optimizer, Some(OptimizerConfig::AdamW(adam)));
    let scheduler = SchedulerConfig::WarmupDecayLR {
        warmup: Warmup {
            steps: 500,
            shape: WarmupShape::Linear,
        },
        min_lr: 0.0,
        max_lr: 3e-5,
        total_steps: 10_000,
    };
    assert_eq!(config.scheduler, Some(scheduler));
}

#[test]
fn what_is_left_out_is_the_default() {
    assert_eq!(read(json!({})), JobConfig::default());
    let config =
        read(json!({"optimizer": {"type": "Adam"}, "scheduler": null, "fp16": {"enabled": false}}));
    let adamw = OptimizerConfig::AdamW(AdamParams::default());
    assert_eq!((config.amp, config.optimizer), (Amp::Off, Some(adamw)));
    assert_eq!(config.scheduler, None);
}

#[test]
fn variants_of_the_file_are_read_too() {
    assert_eq!(read(json!({"bfloat16": {"enabled": true}})).amp, Amp::Bf16);
    let fixed = read(json!({"fp16": {"enabled": true, "loss_scale": 128}}));
    assert_eq!(
        (fixed.amp, fixed.scaler),
        (Amp::F16, GradScalerConfig::fixed(128.0))
    );
    let l2 = read(json!({"optimizer": {"type": "Adam", "params": {"adam_w_mode": false}}}));
    assert_eq!(
        l2.optimizer,
        Some(OptimizerConfig::Adam(AdamParams::default()))
    );
}

#[test]
fn errors_name_the_place_and_what_to_put() {
    let fp16 = |key: &str, value: Value| json!({"fp16": {"enabled": true, key: value}});
    let adam = |params: Value| json!({"optimizer": {"type": "adam", "params": params}});
    let decay = |params: Value| json!({"scheduler": {"type": "WarmupDecayLR", "params": params}});
    for (json, text) in [
        (
            json!({"fp16": {"enabled": "yes"}}),
            "fp16: invalid type: string \"yes\", expected a boolean",
        ),
        (
            json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}}),
            "fp16.enabled: bf16.enabled is there too, but operations compute in one of them",
        ),
        (fp16("initial_scale_power", json!(128)), "fp16: "),
        (fp16("min_loss_scale", json!(1e6)), "fp16: "),
        (fp16("hysteresis", json!(0)), "fp16: "),
        (fp16("loss_scale_window", json!(0)), "fp16: "),
        (
            adam(json!({"betas": [0.9, 1.0]})),
            "optimizer.params.betas: 1, but it must be at least 0 and below 1",
        ),
        (
            adam(json!({"eps": -1})),
            "optimizer.params.eps: -1, but it must be at least 0",
        ),
        (
            adam(json!({"adam_w_mode": 3})),
            "optimizer.params.adam_w_mode: invalid type: integer `3`, expected a boolean",
        ),
        (
            decay(json!({})),
            "scheduler.params.total_num_steps: 0, but it must be at least 1",
        ),
        (
            decay(json!({"warmup_type": "cubic"})),
            "scheduler.params: unknown variant `cubic`, expected `log` or `linear`",
        ),
    ] {
        let error = try_read(&json).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}

/// PyTorch's AdamW decays by 0.01 unless it is told; PyTorch's Adam and DeepSpeed's own decay by nothing.
#[test]
fn torch_adam_has_pytorchs_weight_decay() {
    let optimizer = |kind: &str, params: Value| {
        read(json!({"optimizer": {"type": kind, "params": params}})).optimizer
    };
    let decayed = |weight_decay| AdamParams {
        weight_decay,
        ..Default::default()
    };
    let adamw = |weight_decay| Some(OptimizerConfig::AdamW(decayed(weight_decay)));
    assert_eq!(optimizer("AdamW", json!({"torch_adam": true})), adamw(0.01));
    assert_eq!(optimizer("Adam", json!({"torch_adam": true})), adamw(0.01));
    assert_eq!(optimizer("AdamW", json!({"torch_adam": false})), adamw(0.0));
    assert_eq!(
        optimizer("AdamW", json!({"torch_adam": true, "weight_decay": 0.3})),
        adamw(0.3)
    );
    assert_eq!(
        optimizer("Adam", json!({"torch_adam": true, "adam_w_mode": false})),
        Some(OptimizerConfig::Adam(decayed(0.0)))
    );
    // "AdamW" stays AdamW, whatever the mode says.
    assert_eq!(
        optimizer("AdamW", json!({"torch_adam": true, "adam_w_mode": false})),
        adamw(0.01)
    );
}

/// DeepSpeed steps a schedule after an update, so that the first update has the rate from before the first step, and each other
/// one that of the step before.
#[test]
fn a_schedule_is_stepped_after_the_update() {
    let rates = |kind: &str, params: Value| {
        let scheduler = read(json!({"scheduler": {"type": kind, "params": params}})).scheduler;
        let scheduler = scheduler.unwrap();
        (0..8)
            .map(|update| scheduler.lr(update, 0.5))
            .collect::<Vec<_>>()
    };
    let linear = json!({"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_lr": 0.25, "warmup_max_lr": 1.25});
    assert_eq!(
        rates("WarmupLR", linear.clone()),
        [0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 1.25, 1.25]
    );
    let mut decay = linear;
    decay["total_num_steps"] = json!(6);
    assert_eq!(
        rates("WarmupDecayLR", decay),
        [0.25, 0.25, 0.5, 0.75, 1.0, 1.25, 0.75, 0.25]
    );
    // The cosine begins at 0, and at its own first ratio after one update.
    let cosine = json!({"warmup_num_steps": 4, "warmup_type": "linear", "warmup_min_ratio": 0.5, "cos_min_ratio": 0.0,
        "total_num_steps": 6});
    let found = rates("WarmupCosineLR", cosine);
    let expected = [0.0, 0.25, 0.3125, 0.375, 0.4375, 0.25, 0.0, 0.0];
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (found - expected).abs() < 1e-12,
            "{found} instead of {expected}"
        );
    }
}

#[test]
fn the_program_fills_auto_in() {
    let file = json!({
        "gradient_clipping": "auto",
        "fp16": {"enabled": "auto", "initial_scale_power": 4}, "bf16": {"enabled": "auto"},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_gather_16bit_weights_on_model_save": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto"}},
    });
    let config = read(file.clone());
    assert_eq!(config.zero.gradient_clipping, Some(1.0));
    // The scaling is the file's.
    let scaler = GradScalerConfig {
        init_scale: 16.0,
        ..deepspeeds_scaler()
    };
    assert_eq!((config.amp, config.scaler), (Amp::F16, scaler));
    let adam = AdamParams {
        lr: 0.02,
        betas: (0.8, 0.9),
        eps: 1e-6,
        weight_decay: 0.3,
    };
    assert_eq!(config.optimizer, Some(OptimizerConfig::AdamW(adam)));
    let Some(SchedulerConfig::WarmupDecayLR {
        warmup,
        min_lr,
        max_lr,
        total_steps,
    }) = config.scheduler
    else {
        panic!("{:?}", config.scheduler);
    };
    assert_eq!(
        (warmup.steps, min_lr, max_lr, total_steps),
        (7, 0.0, 0.02, 70)
    );
    assert_eq!(config.zero.reduce_bucket_size, 10_000);

    // A schedule rises to the rate that the file says, not to that of an option that it overrides.
    let mut fixed = file.clone();
    fixed["optimizer"]["params"]["lr"] = json!(0.75);
    let fixed = read(fixed);
    assert_eq!(fixed.scheduler.unwrap().lr(8, 9.0), 0.75);

    for amp in [Amp::Bf16, Amp::Off] {
        let config = JobConfig::read(&file.to_string(), &auto(amp)).unwrap();
        assert_eq!(config.amp, amp);
    }
}

/// The files that burn-zero loads, each with a feature.
#[test]
fn every_file_that_loads_is_a_job() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("../burn-zero/tests/config/files");
    let mut jobs = 0;
    for file in fs::read_dir(directory).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        let loads = ZeroConfig::from_deepspeed_json_with(&text, &|path| match path {
            "optimizer.params.betas" => Some(json!([0.9, 0.95])),
            path if path.ends_with("enabled") => Some(json!(false)),
            path if path.contains(".params.") => Some(json!(1)),
            _ => None,
        });
        if loads.is_ok() {
            let job = JobConfig::read(&text, &auto(Amp::Off));
            job.unwrap_or_else(|error| panic!("{}: {error}", file.display()));
            jobs += 1;
        }
    }
    assert_eq!(jobs, 39, "30 load without help, and 9 with it");
}
