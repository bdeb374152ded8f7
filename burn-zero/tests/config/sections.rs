//! What precision and optimizer of DeepSpeed's file mean, by DeepSpeed 0.19.8.

use std::fs;
use std::path::Path;

use burn_amp::GradScalerConfig;
use burn_zero::{DeepSpeedConfig, DeepSpeedPrecision, HostAdamWConfig, ZeroConfig, ZeroError};

use crate::fault;
use serde_json::{Value, json};

fn try_read(json: &Value) -> Result<DeepSpeedConfig, ZeroError> {
    DeepSpeedConfig::from_json(&json.to_string())
}

fn read(json: Value) -> DeepSpeedConfig {
    try_read(&json).unwrap()
}

fn adam(beta_1: f64, beta_2: f64, epsilon: f64, weight_decay: f64) -> HostAdamWConfig {
    HostAdamWConfig {
        beta_1,
        beta_2,
        epsilon,
        weight_decay,
    }
}

#[test]
fn every_section_is_read() {
    let file = read(json!({
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 3,
            "min_loss_scale": 2, "auto_cast": false, "consecutive_hysteresis": false},
        "bf16": {"enabled": false},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1}},
    }));
    let scaler = GradScalerConfig {
        init_scale: 4096.0,
        growth_interval: 500,
        hysteresis: 3,
        min_scale: 2.0,
        ..GradScalerConfig::default()
    };
    assert_eq!(file.precision, DeepSpeedPrecision::F16(scaler));
    assert_eq!(file.learning_rate, Some(3e-5));
    assert_eq!(file.adamw, Some(adam(0.8, 0.99, 1e-6, 0.1)));
}

#[test]
fn what_is_left_out_is_the_default() {
    let nothing = read(json!({}));
    assert_eq!(nothing.zero, ZeroConfig::default());
    assert_eq!(nothing.precision, DeepSpeedPrecision::F32);
    assert_eq!((nothing.adamw, nothing.learning_rate), (None, None));
    let off = json!({"optimizer": {"type": "Adam"}, "scheduler": null, "fp16": {"enabled": false}});
    let file = read(off);
    assert_eq!(file.precision, DeepSpeedPrecision::F32);
    assert_eq!(file.learning_rate, Some(1e-3));
    assert_eq!(file.adamw, Some(adam(0.9, 0.999, 1e-8, 0.0)));
    let scaler = GradScalerConfig {
        growth_interval: 1000,
        hysteresis: 2,
        ..GradScalerConfig::default()
    };
    let file = read(json!({"fp16": {"enabled": true}}));
    assert_eq!(file.precision, DeepSpeedPrecision::F16(scaler));
}

#[test]
fn variants_of_the_file_are_read_too() {
    let bf16 = read(json!({"bfloat16": {"enabled": true}})).precision;
    assert_eq!(bf16, DeepSpeedPrecision::Bf16);
    let fixed = read(json!({"fp16": {"enabled": true, "loss_scale": 128}})).precision;
    assert_eq!(
        fixed,
        DeepSpeedPrecision::F16(GradScalerConfig::fixed(128.0))
    );
}

#[test]
fn errors_name_the_place_and_what_to_put() {
    let fp16 = |key: &str, value: Value| json!({"fp16": {"enabled": true, key: value}});
    let adam = |params: Value| json!({"optimizer": {"type": "adam", "params": params}});
    for (json, text) in [
        (
            json!({"fp16": {"enabled": "yes"}}),
            "fp16: invalid type: string \"yes\", expected a boolean",
        ),
        (
            json!({"fp16": {"enabled": true}, "bf16": {"enabled": true}}),
            "fp16.enabled: leave it or bf16.enabled out",
        ),
        (fp16("initial_scale_power", json!(128)), "fp16: "),
        (fp16("min_loss_scale", json!(1e6)), "fp16: "),
        (fp16("hysteresis", json!(0)), "fp16: "),
        (fp16("loss_scale_window", json!(0)), "fp16: "),
        (
            adam(json!({"betas": [0.9, 1.0]})),
            "optimizer.params: beta_2",
        ),
        (adam(json!({"eps": -1})), "optimizer.params: epsilon"),
        (
            adam(json!({"adam_w_mode": 3})),
            "optimizer.params: invalid type: integer `3`, expected a boolean",
        ),
        (
            adam(json!({"adam_w_mode": false})),
            "optimizer.type: an update of a file is by AdamW: say so",
        ),
        (
            json!({"optimizer": {"type": "SGD"}}),
            "optimizer.type: an update of a file is by AdamW: say so",
        ),
        (
            json!({"optimizer": {"type": "AdamW", "lr": 1e-4}}),
            "optimizer.lr: it has no such key",
        ),
        (
            adam(json!([1e-4])),
            "optimizer.params: it has to be an object",
        ),
        (json!({"fp16": true}), "fp16: it has to be an object"),
        (json!({"bf16": true}), "bf16: it has to be an object"),
        (
            json!({"scheduler": {"type": "WarmupLR"}}),
            "scheduler: an update has no schedule",
        ),
        (
            json!({"zero_optimization": {"stage": 7}}),
            "zero_optimization.stage: ",
        ),
    ] {
        let error = try_read(&json).unwrap_err().to_string();
        assert!(error.starts_with(text), "{error}");
    }
}

#[test]
fn a_long_value_is_shown_by_its_beginning() {
    let (long, beginning) = ("x".repeat(1000), "x".repeat(39));
    let file = json!({"bf16": {"bf16_master_weights_and_grads": long}});
    let error = try_read(&file).unwrap_err().to_string();
    let expected =
        format!("bf16.bf16_master_weights_and_grads: \"{beginning}.. is not supported: ");
    assert!(error.starts_with(&expected), "{error}");
}

/// PyTorch's AdamW decays by 0.01 unless it is told; DeepSpeed's own decays by nothing.
#[test]
fn torch_adam_has_pytorchs_weight_decay() {
    let decay = |kind: &str, params: Value| {
        let file = read(json!({"optimizer": {"type": kind, "params": params}}));
        file.adamw.unwrap().weight_decay
    };
    assert_eq!(decay("AdamW", json!({"torch_adam": true})), 0.01);
    assert_eq!(decay("Adam", json!({"torch_adam": true})), 0.01);
    assert_eq!(decay("AdamW", json!({"torch_adam": false})), 0.0);
    let named = json!({"torch_adam": true, "weight_decay": 0.3});
    assert_eq!(decay("AdamW", named), 0.3);
    // "AdamW" stays AdamW, whatever the mode says.
    let mode = json!({"torch_adam": true, "adam_w_mode": false});
    assert_eq!(decay("AdamW", mode), 0.01);
}

/// Of the files that are a `ZeroConfig`, each with a feature, those that are no update for it.
const REFUSED: [(&str, &str); 13] = [
    ("adagrad", "optimizer.type: an update of a file is by AdamW"),
    ("auto_total_steps", "scheduler: an update has no schedule"),
    ("auto_warmup", "scheduler: an update has no schedule"),
    ("auto_warmup_steps", "scheduler: an update has no schedule"),
    (
        "bf16_masters",
        "bf16.bf16_master_weights_and_grads: true is not supported: ",
    ),
    (
        "bias_correction",
        "optimizer.params.bias_correction: false is not supported: moments are always corrected",
    ),
    ("lamb", "optimizer.type: an update of a file is by AdamW"),
    (
        "max_grad_norm",
        "optimizer.params.max_grad_norm: 1 is not supported: put it into gradient_clipping",
    ),
    ("one_bit_adam", "optimizer.type: an update of a file is"),
    ("one_bit_lamb", "optimizer.type: an update of a file is"),
    ("one_cycle", "scheduler: an update has no schedule"),
    ("sgd", "optimizer.type: an update of a file is by AdamW"),
    ("zero_one_adam", "optimizer.type: an update of a file is"),
];

#[test]
fn every_file_that_loads_is_an_update_or_refused_by_what_there_is_not() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/config/files");
    let (mut read, mut refused) = (0, 0);
    for file in fs::read_dir(directory).unwrap() {
        let file = file.unwrap().path();
        let text = fs::read_to_string(&file).unwrap();
        let name = file.file_stem().unwrap().to_str().unwrap();
        let auto = |path: &str| match path {
            "optimizer.params.betas" => Some(json!([0.9, 0.95])),
            path if path.ends_with("enabled") => Some(json!(false)),
            path if path.contains(".params.") => Some(json!(1)),
            _ => None,
        };
        if ZeroConfig::from_deepspeed_json_with(&text, &auto).is_err() {
            continue;
        }
        let expected = REFUSED.iter().find(|(refused, _)| *refused == name);
        match (DeepSpeedConfig::from_json_with(&text, &auto), expected) {
            (Ok(_), None) => read += 1,
            (Err(error), Some((_, text))) => {
                assert!(error.to_string().starts_with(text), "{name}: {error}");
                refused += 1;
            }
            (Err(error), None) => {
                assert_eq!(fault(error).path(), Some("scheduler"), "{name}");
                refused += 1;
            }
            (Ok(_), Some(_)) => panic!("{name} was read"),
        }
    }
    assert!(
        read >= 25 && refused >= REFUSED.len(),
        "{read} read, {refused} refused"
    );
}
