//! What DeepSpeed 0.19.8 does and this crate did otherwise.

use burn_zero::{
    AdamParams, AutoValues, ConfigError, LossScaling, OptimizerConfig, Precision, SchedulerConfig,
    Stage3Config, ZeroConfig,
};
use serde_json::{Value, json};

fn read(json: Value) -> ZeroConfig {
    ZeroConfig::from_deepspeed_json(&json.to_string()).unwrap()
}

#[test]
fn a_file_without_the_key_clips_to_1() {
    assert_eq!(read(json!({})).gradient_clipping, Some(1.0));
    assert_eq!(
        read(json!({"gradient_clipping": null})).gradient_clipping,
        Some(1.0)
    );
    assert_eq!(
        read(json!({"gradient_clipping": 0})).gradient_clipping,
        None
    );
    assert_eq!(
        read(json!({"gradient_clipping": 0.5})).gradient_clipping,
        Some(0.5)
    );
}

#[test]
fn sequence_parallelism_sends_in_a_type_of_its_own_name() {
    let config = read(json!({"seq_parallel_communication_data_type": "bf16"}));
    assert_eq!(
        config.ignored[0].path,
        "seq_parallel_communication_data_type"
    );
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

/// The templates of Accelerate and Transformers say it nearly everywhere.
#[test]
fn auto_is_the_default_where_there_is_one() {
    let config = read(json!({
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
    }));
    assert_eq!(config.gradient_clipping, Some(1.0));
    assert_eq!(
        config.reduce_bucket_size,
        ZeroConfig::default().reduce_bucket_size
    );
    let error = config.resolve(2).unwrap_err();
    assert_eq!(
        error.to_string(),
        "neither train_batch_size nor train_micro_batch_size_per_gpu has a number: put one there, or set it in ZeroConfig::batch"
    );
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
    let auto = AutoValues {
        precision: Some(Precision::F16(LossScaling::default())),
        gradient_clipping: Some(0.5),
        lr: Some(0.02),
        betas: Some((0.8, 0.9)),
        eps: Some(1e-6),
        weight_decay: Some(0.3),
        warmup_steps: Some(7),
        total_steps: Some(70),
        hidden_size: Some(100),
    };
    let read = |file: &Value, auto: &AutoValues| {
        ZeroConfig::from_deepspeed_json_with(&file.to_string(), auto)
    };
    let config = read(&file, &auto).unwrap();
    assert_eq!(config.gradient_clipping, Some(0.5));
    // The scaling is the file's.
    let scaling = LossScaling::Dynamic {
        initial_scale: 16.0,
        window: 1000,
        hysteresis: 2,
        min_scale: 1.0,
    };
    assert_eq!(config.precision, Precision::F16(scaling));
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
    assert_eq!(config.reduce_bucket_size, 10_000);
    let expected = Stage3Config {
        prefetch_bucket_size: 9000,
        param_persistence_threshold: 1000,
        ..Default::default()
    };
    assert_eq!(config.stage_3, expected);

    // A schedule rises to the rate that the file says, not to that of an option that it overrides.
    let mut fixed = file.clone();
    fixed["optimizer"]["params"]["lr"] = json!(0.75);
    let fixed = read(&fixed, &auto).unwrap();
    assert_eq!(fixed.scheduler.unwrap().lr(8, 9.0), 0.75);

    let bf16 = AutoValues {
        precision: Some(Precision::Bf16),
        ..auto.clone()
    };
    assert_eq!(read(&file, &bf16).unwrap().precision, Precision::Bf16);
    let f32 = AutoValues {
        precision: Some(Precision::F32),
        ..auto.clone()
    };
    assert_eq!(read(&file, &f32).unwrap().precision, Precision::F32);

    // Nothing fills one of them: the key, and what would.
    let without = AutoValues {
        total_steps: None,
        ..auto
    };
    let error = read(&file, &without).unwrap_err();
    let expected = ConfigError::Auto {
        path: "scheduler.params.total_num_steps".to_owned(),
        option: "total_steps",
    };
    assert_eq!(error, expected);
}

#[test]
fn the_keys_of_stage_3_have_deepspeeds_defaults() {
    let expected = Stage3Config {
        prefetch_bucket_size: 50_000_000,
        param_persistence_threshold: 100_000,
        model_persistence_threshold: (1 << 63) - 1,
        max_live_parameters: 1_000_000_000,
        max_reuse_distance: 1_000_000_000,
        sub_group_size: 1_000_000_000,
        gather_16bit_weights_on_model_save: false,
        offload_param: false,
    };
    assert_eq!(
        read(json!({"zero_optimization": {"stage": 2}})).stage_3,
        expected
    );
    let config = read(
        json!({"zero_optimization": {"stage3_prefetch_bucket_size": 1e6, "param_persistence_threshold": 2,
        "stage3_model_persistence_threshold": 3, "stage3_max_live_parameters": 4, "max_reuse_distance": 5, "sub_group_size": 1e14,
        "stage3_gather_fp16_weights_on_model_save": true, "cpu_offload_param": true}}),
    );
    let expected = Stage3Config {
        prefetch_bucket_size: 1_000_000,
        param_persistence_threshold: 2,
        model_persistence_threshold: 3,
        max_live_parameters: 4,
        max_reuse_distance: 5,
        sub_group_size: 100_000_000_000_000,
        gather_16bit_weights_on_model_save: true,
        offload_param: true,
    };
    assert_eq!(config.stage_3, expected);
    assert_eq!(
        config.ignored.len(),
        8,
        "they have no meaning before stage 3: {:?}",
        config.ignored
    );
    let read = |text: &str| {
        ZeroConfig::from_deepspeed_json(text)
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        read(r#"{"zero_optimization": {"stage3_max_live_parameters": "all"}}"#),
        "zero_optimization.stage3_max_live_parameters: invalid type: string \"all\", expected u64"
    );
}
