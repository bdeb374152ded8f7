//! All of a DeepSpeed file: beside a [`ZeroConfig`] its sections of precision and optimizer.

use burn_amp::{AmpConfig, GradScalerConfig};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::ZeroConfig;
use super::deepspeed::preview;
use super::keys::{Treatment, key};
use crate::error::ConfigFault;
use crate::error::ZeroError;
use crate::offload::HostAdamWConfig;

/// A DeepSpeed file (`ds_config.json`), with all that it asks for: what
/// [`Update::from_deepspeed`](crate::FromDeepSpeed::from_deepspeed) makes an update of. Its fields
/// may be changed before, by a program's options for example.
///
/// ```
/// use burn_amp::AmpConfig;
/// use burn_zero::{DeepSpeedConfig, Memory, Stage, ZeroError};
///
/// let config = DeepSpeedConfig::from_json(
///     r#"{"train_batch_size": 64, "gradient_clipping": 0.5, "fp16": {"enabled": true},
///         "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "weight_decay": 0.1}},
///         "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}"#,
/// )?;
/// assert_eq!((config.zero.stage, config.zero.offload_optimizer), (Stage::Gradients, Memory::Host));
/// assert_eq!(config.precision.amp(), AmpConfig::f16());
/// assert_eq!(config.adamw.unwrap().weight_decay, 0.1);
///
/// let refused = DeepSpeedConfig::from_json(r#"{"fp16": {"enabled": "yes"}}"#);
/// assert!(matches!(refused, Err(ZeroError::Config(fault)) if fault.path() == Some("fp16")));
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct DeepSpeedConfig {
    /// Stage, batch sizes, clipping, offload, communication.
    pub zero: ZeroConfig,
    /// What operations compute in, and how losses are scaled in it.
    pub precision: DeepSpeedPrecision,
    /// AdamW's numbers; `None` if the file has no `optimizer`.
    pub adamw: Option<HostAdamWConfig>,
    /// The learning rate of `optimizer`, for the program's schedule.
    pub learning_rate: Option<f64>,
}

/// What operations compute in, by the sections `fp16` and `bf16` of a DeepSpeed file.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum DeepSpeedPrecision {
    /// f32: neither is enabled.
    #[default]
    F32,
    /// bf16, whose losses need no scale.
    Bf16,
    /// f16, with this scale of losses.
    F16(GradScalerConfig),
}

impl DeepSpeedPrecision {
    /// The policy for a backend that is `Autocast<.., Configured>`:
    /// `config.precision.amp().install()`.
    pub fn amp(&self) -> AmpConfig {
        match self {
            Self::F32 => AmpConfig::off(),
            Self::Bf16 => AmpConfig::bf16(),
            Self::F16(_) => AmpConfig::f16(),
        }
    }

    /// The scale of losses; without f16 one that does nothing.
    pub fn scaler(&self) -> GradScalerConfig {
        match self {
            Self::F32 | Self::Bf16 => GradScalerConfig::disabled(),
            Self::F16(scaler) => scaler.clone(),
        }
    }
}

impl DeepSpeedConfig {
    /// Reads a file: see [`ZeroConfig::from_deepspeed_json`].
    ///
    /// # Errors
    ///
    /// Those of [`ZeroConfig::from_deepspeed_json`]; [`ConfigFault::Key`] for an optimizer other
    /// than AdamW, a `scheduler`, an unknown key, and a number that cannot work.
    pub fn from_json(text: &str) -> Result<Self, ZeroError> {
        Self::from_json_with(text, &|_| None)
    }

    /// Reads a file; `auto` gives the program's value of a key that says `"auto"`: see
    /// [`ZeroConfig::from_deepspeed_json_with`].
    ///
    /// # Errors
    ///
    /// As [`from_json`](Self::from_json).
    pub fn from_json_with(
        text: &str,
        auto: &dyn Fn(&str) -> Option<Value>,
    ) -> Result<Self, ZeroError> {
        ZeroConfig::from_deepspeed_json_with(text, auto)?.try_into()
    }
}

/// Reads the sections that a [`ZeroConfig`] leaves as they are.
///
/// # Errors
///
/// As [`DeepSpeedConfig::from_json`].
impl TryFrom<ZeroConfig> for DeepSpeedConfig {
    type Error = ZeroError;

    fn try_from(zero: ZeroConfig) -> Result<Self, ZeroError> {
        let section = |name| zero.sections.get(name);
        if section("scheduler").is_some() {
            return Err(ConfigFault::key("scheduler", NO_SCHEDULE).into());
        }
        let optimizer = section("optimizer").map(adamw).transpose()?;
        let (learning_rate, adamw) = optimizer.unzip();
        Ok(Self {
            precision: precision(section("fp16"), section("bf16"))?,
            adamw,
            learning_rate,
            zero,
        })
    }
}

const NO_SCHEDULE: &str = "an update has no schedule: leave the section out, and give the training one of Burn's, by `update.per_update(..)` \
                           in the Learner";

const NOT_ADAMW: &str = "an update of a file is by AdamW: say so, or leave the section out. With another of Burn's optimizers build it \
                         by hand: `Update::new(optimizer).reduce(..)`";

/// What is no object turns nothing on: as `"fp16": true` it would be ignored in silence.
fn object<'a>(path: &str, section: &'a Value) -> Result<&'a Map<String, Value>, ConfigFault> {
    section
        .as_object()
        .ok_or_else(|| ConfigFault::key(path, "it has to be an object, as {\"enabled\": true}"))
}

/// A section, with DeepSpeed's defaults of all keys that are read. Of the others those without
/// effect are left out, and those with one are refused for their reason.
fn parse<T: DeserializeOwned>(
    path: &str,
    mut defaults: Value,
    section: Option<&Value>,
) -> Result<T, ConfigFault> {
    let section = section.filter(|section| !section.is_null());
    if let (Some(all), Some(section)) = (defaults.as_object_mut(), section) {
        for (name, value) in object(path, section)? {
            match key(path, name) {
                Some(key) if !key.treatment.has_effect(value) => {}
                Some(key) if matches!(key.treatment, Treatment::Refused(_)) => {
                    let path = format!("{path}.{name}");
                    return Err(ConfigFault::unsupported(path, &preview(value), key.reason));
                }
                _ => {
                    all.insert(name.clone(), value.clone());
                }
            }
        }
    }
    let parsed = serde_json::from_value(defaults);
    parsed.map_err(|error| ConfigFault::key(path, error.to_string()))
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
) -> Result<DeepSpeedPrecision, ConfigFault> {
    let defaults = json!({"enabled": false, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1});
    let fp16: Fp16 = parse("fp16", defaults, fp16)?;
    let bf16: Bf16 = parse("bf16", json!({"enabled": false}), bf16)?;
    match (fp16.enabled, bf16.enabled) {
        (true, false) => {}
        (false, false) => return Ok(DeepSpeedPrecision::F32),
        (false, true) => return Ok(DeepSpeedPrecision::Bf16),
        (true, true) => {
            return Err(ConfigFault::key(
                "fp16.enabled",
                "leave it or bf16.enabled out",
            ));
        }
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
    checked.map_err(|error| ConfigFault::key("fp16", error.to_string()))?;
    Ok(DeepSpeedPrecision::F16(scaler))
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
fn adamw(section: &Value) -> Result<(f64, HostAdamWConfig), ConfigFault> {
    const PARAMS: &str = "optimizer.params";

    let defaults = json!({"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": null, "adam_w_mode": true,
        "torch_adam": false});
    let mut names = object("optimizer", section)?.keys();
    if let Some(name) = names.find(|name| key("optimizer", name).is_none()) {
        return Err(ConfigFault::key(
            format!("optimizer.{name}"),
            "it has no such key: the optimizer's numbers belong into `optimizer.params`",
        ));
    }
    let other = || ConfigFault::key("optimizer.type", NOT_ADAMW);
    let name = section["type"].as_str().unwrap_or_default();
    let kind = name.to_ascii_lowercase();
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
    let checked = config.validate();
    checked.map_err(|error| ConfigFault::key(PARAMS, error.to_string()))?;
    Ok((adam.lr, config))
}

#[cfg(test)]
mod tests {
    use super::super::keys::{Treatment, keys};
    use super::*;

    /// The fields of a section, as serde lists them for a name that is none.
    fn fields<T: DeserializeOwned>() -> Vec<String> {
        let error = serde_json::from_value::<T>(json!({"no key": 0}));
        let text = error.err().expect("there is no such field").to_string();
        let quoted = text.split('`').skip(1).step_by(2);
        quoted
            .filter(|name| *name != "no key")
            .map(str::to_owned)
            .collect()
    }

    #[test]
    fn what_is_read_of_a_section_is_what_the_table_says() {
        let sections = [
            ("fp16", fields::<Fp16>()),
            ("bf16", fields::<Bf16>()),
            ("optimizer.params", fields::<Adam>()),
        ];
        for (path, fields) in sections {
            let read = keys(path).filter(|key| key.treatment == Treatment::Read);
            let read: Vec<_> = read.map(|key| key.name).collect();
            assert_eq!(read, fields, "{path}");
        }
    }
}
