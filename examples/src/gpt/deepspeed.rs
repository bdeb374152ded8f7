//! What the sections of DeepSpeed's file mean that burn-zero leaves to the program: precision and
//! optimizer.

use burn_amp::GradScalerConfig;
use burn_zero::{ConfigError, HostAdamWConfig, ZeroConfig};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::training::precision::Amp;

/// A file in DeepSpeed's format.
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeed {
    /// Stage, batch sizes, clipping, offload, communication.
    pub zero: ZeroConfig,
    /// A lower precision, and how losses are scaled in it.
    pub precision: Option<(Amp, GradScalerConfig)>,
    /// Learning rate and numbers of AdamW, if the file names an optimizer.
    pub adamw: Option<(f64, HostAdamWConfig)>,
}

impl DeepSpeed {
    /// Reads a file; `auto` gives the program's value of a key that says `"auto"`.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroConfig::from_deepspeed_json_with`]; an optimizer other than AdamW, a
    /// schedule, a number that cannot work.
    pub fn read(text: &str, auto: &dyn Fn(&str) -> Option<Value>) -> Result<Self, ConfigError> {
        let file: Value = serde_json::from_str(text).unwrap_or_default();
        if !file["scheduler"].is_null() {
            let reason = "this program warms the learning rate up and lets it fall along a cosine: leave the section out, and see --warmup";
            return Err(refused("scheduler", reason));
        }
        let zero = ZeroConfig::from_deepspeed_json_with(text, auto)?;
        let section = |name| zero.sections.get(name);
        Ok(Self {
            precision: precision(section("fp16"), section("bf16"))?,
            adamw: section("optimizer").map(adamw).transpose()?,
            zero,
        })
    }
}

fn refused(path: &str, reason: impl ToString) -> ConfigError {
    ConfigError::Key {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Keys without effect here: operations cast their inputs, gradients are f32 at once, the optimizer
/// is fused where it can be.
const IGNORED: [&str; 7] = [
    "auto_cast",
    "fused_mode",
    "immediate_grad_update",
    "check_grad_overflow",
    "fused",
    "foreach",
    "capturable",
];

/// A section, with DeepSpeed's defaults of all its keys.
fn parse<T: DeserializeOwned>(
    path: &str,
    mut defaults: Value,
    section: Option<&Value>,
) -> Result<T, ConfigError> {
    // Keys that ask for nothing with these values; with others they are unknown.
    let harmless = json!({"consecutive_hysteresis": false, "fp16_master_weights_and_grads": false,
        "bf16_master_weights_and_grads": false, "bf16_optimizer_states": false, "fp32_optimizer_states": true,
        "bias_correction": true, "amsgrad": false, "maximize": false, "max_grad_norm": 0});
    let section = section.and_then(Value::as_object);
    if let (Some(all), Some(section)) = (defaults.as_object_mut(), section) {
        let has_effect = |(key, value): &(&String, &Value)| {
            !IGNORED.contains(&&***key) && harmless.get(key) != Some(value)
        };
        let section = section.iter().filter(has_effect);
        all.extend(section.map(|(key, value)| (key.clone(), value.clone())));
    }
    serde_json::from_value(defaults).map_err(|error| refused(path, error))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Bf16 {
    enabled: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fp16 {
    enabled: bool,
    /// 0 for a scale that moves.
    loss_scale: f32,
    initial_scale_power: i32,
    loss_scale_window: u32,
    hysteresis: u32,
    min_loss_scale: f32,
}

fn precision(
    fp16: Option<&Value>,
    bf16: Option<&Value>,
) -> Result<Option<(Amp, GradScalerConfig)>, ConfigError> {
    let defaults = json!({"enabled": false, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1});
    let fp16: Fp16 = parse("fp16", defaults, fp16)?;
    let bf16: Bf16 = parse("bf16", json!({"enabled": false}), bf16)?;
    match (fp16.enabled, bf16.enabled) {
        (true, false) => {}
        (false, false) => return Ok(None),
        (false, true) => return Ok(Some((Amp::Bf16, GradScalerConfig::disabled()))),
        (true, true) => return Err(refused("fp16.enabled", "leave it or bf16.enabled out")),
    }
    let scaler = match fp16.loss_scale {
        0.0 => GradScalerConfig {
            init_scale: 2f32.powi(fp16.initial_scale_power),
            growth_interval: fp16.loss_scale_window,
            hysteresis: fp16.hysteresis,
            min_scale: fp16.min_loss_scale,
            ..GradScalerConfig::default()
        },
        fixed => GradScalerConfig::fixed(fixed),
    };
    let checked = scaler.validate();
    checked.map_err(|error| refused("fp16", error))?;
    Ok(Some((Amp::F16, scaler)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Adam {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: Option<f64>,
    adam_w_mode: bool,
    torch_adam: bool,
}

/// In DeepSpeed `"Adam"` is AdamW unless `adam_w_mode` is false, and `"AdamW"` always is. With
/// `torch_adam` the optimizer is PyTorch's, with the default weight decay of its AdamW.
fn adamw(section: &Value) -> Result<(f64, HostAdamWConfig), ConfigError> {
    const PARAMS: &str = "optimizer.params";

    let defaults = json!({"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": null, "adam_w_mode": true,
        "torch_adam": false});
    let other = || {
        let reason = "this program trains with AdamW: say so, or leave the section out. A program of one's own can shard any of Burn's \
                      optimizers with burn_zero::ZeroOptimizer";
        refused("optimizer.type", reason)
    };
    let kind = section["type"].as_str().unwrap_or_default();
    let kind = kind.to_ascii_lowercase();
    if !["adam", "adamw"].contains(&&*kind) {
        return Err(other());
    }
    let adam: Adam = parse(PARAMS, defaults, section.get("params"))?;
    if kind == "adam" && !adam.adam_w_mode {
        return Err(other());
    }
    let decay = if adam.torch_adam { 0.01 } else { 0.0 };
    let config = HostAdamWConfig {
        beta_1: adam.betas.0,
        beta_2: adam.betas.1,
        epsilon: adam.eps,
        weight_decay: adam.weight_decay.unwrap_or(decay),
    };
    config.validate().map_err(|error| refused(PARAMS, error))?;
    Ok((adam.lr, config))
}
