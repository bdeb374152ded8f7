//! Reads DeepSpeed's JSON: the table of keys says which are read, and serde's derive reads those.

mod keys;

use std::collections::BTreeMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use strsim::damerau_levenshtein;

use keys::keys;

use super::{
    BatchConfig, ConfigError, IgnoredKey, LossScaling, OptimizerConfig, OptimizerOffload,
    Precision, SchedulerConfig, Stage3Config, ZeroConfig,
};
use crate::Stage;
use crate::group::BufferDtype;

/// Values for `"auto"`, which the templates of Accelerate and Transformers have for values of the program's options
/// and its model. A field is needed only if the file has `"auto"` for it.
///
/// Without a field, `"auto"` means the default for `gradient_clipping`, for `scheduler.params.warmup_min_lr` and for keys of
/// `zero_optimization`, as in Accelerate and DeepSpeed; a batch size counts as missing.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct AutoValues {
    /// Fills `fp16.enabled` and `bf16.enabled`: which of them, if any. The loss scaling is the file's.
    pub precision: Option<Precision>,
    /// Fills `gradient_clipping`.
    pub gradient_clipping: Option<f64>,
    /// Fills `optimizer.params.lr`, and `scheduler.params.warmup_max_lr` where the file does not say the optimizer's.
    pub lr: Option<f64>,
    /// Fills `optimizer.params.betas`.
    pub betas: Option<(f64, f64)>,
    /// Fills `optimizer.params.eps`.
    pub eps: Option<f64>,
    /// Fills `optimizer.params.weight_decay`.
    pub weight_decay: Option<f64>,
    /// Fills `scheduler.params.warmup_num_steps`.
    pub warmup_steps: Option<u64>,
    /// Fills `scheduler.params.total_num_steps`: the updates of the training.
    pub total_steps: Option<u64>,
    /// Features of a token in the model, `h`: `zero_optimization.reduce_bucket_size` becomes `h^2`, `stage3_prefetch_bucket_size`
    /// `0.9 h^2` and `stage3_param_persistence_threshold` `10 h`, as in Transformers.
    pub hidden_size: Option<u64>,
}

impl AutoValues {
    /// The value of a key that says `"auto"`; `None` for the key's default.
    fn fill(&self, path: &str) -> Result<Option<Value>, ConfigError> {
        let square = self.hidden_size.map(|size| size.saturating_mul(size));
        let is_f16 = |precision| matches!(precision, Precision::F16(_));
        let is_bf16 = |precision| precision == Precision::Bf16;
        // Values that only the program knows.
        let (value, option) = match path {
            "fp16.enabled" => (self.precision.map(is_f16).into(), "precision"),
            "bf16.enabled" | "bfloat16.enabled" => {
                (self.precision.map(is_bf16).into(), "precision")
            }
            "optimizer.params.lr" | "scheduler.params.warmup_max_lr" => (self.lr.into(), "lr"),
            "optimizer.params.betas" => (json!(self.betas), "betas"),
            "optimizer.params.eps" => (self.eps.into(), "eps"),
            "optimizer.params.weight_decay" => (self.weight_decay.into(), "weight_decay"),
            "scheduler.params.warmup_num_steps" => (self.warmup_steps.into(), "warmup_steps"),
            "scheduler.params.total_num_steps" => (self.total_steps.into(), "total_steps"),
            "gradient_clipping" => return Ok(self.gradient_clipping.map(Value::from)),
            "zero_optimization.reduce_bucket_size" => return Ok(square.map(Value::from)),
            "zero_optimization.stage3_prefetch_bucket_size" => {
                return Ok(square.map(|square| Value::from((square as f64 * 0.9) as u64)));
            }
            "zero_optimization.stage3_param_persistence_threshold" => {
                return Ok(self.hidden_size.map(|size| size.saturating_mul(10).into()));
            }
            "train_batch_size" | "train_micro_batch_size_per_gpu" => return Ok(None),
            "gradient_accumulation_steps" | "scheduler.params.warmup_min_lr" => return Ok(None),
            // Passed on: the reader of the stage reports the error.
            "zero_optimization.stage" => return Ok(Some("auto".into())),
            _ if path.starts_with("zero_optimization.") || path.starts_with("fp16.") => {
                return Ok(None);
            }
            _ => return Ok(Some("auto".into())),
        };
        match value {
            Value::Null => Err(ConfigError::Auto {
                path: path.to_owned(),
                option,
            }),
            value => Ok(Some(value)),
        }
    }
}

/// The configuration of a file, its numbers not yet checked.
pub(super) fn read(text: &str, auto: &AutoValues) -> Result<ZeroConfig, ConfigError> {
    // The whole text is parsed first, so that later steps can rely on valid JSON.
    if let Err(error) = serde_json::from_str::<Value>(text) {
        let message = error.to_string();
        return Err(ConfigError::Syntax { message });
    }
    let mut reader = Reader {
        auto: auto.clone(),
        ignored: Vec::new(),
    };
    let config = reader.top(text)?;
    Ok(ZeroConfig {
        ignored: reader.ignored,
        ..config
    })
}

struct Reader {
    auto: AutoValues,
    ignored: Vec<IgnoredKey>,
}

/// The keys of an object that are read, with the texts of their values: `"auto"` filled in, without those that are null.
struct Section {
    path: String,
    entries: BTreeMap<String, String>,
}

/// Keys and values of an object in their order, duplicates included, which `serde_json::Value` would drop.
struct Entries(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Object;

        impl<'de> Visitor<'de> for Object {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let next = std::iter::from_fn(|| map.next_entry().transpose());
                next.collect::<Result<_, _>>().map(Entries)
            }
        }

        deserializer.deserialize_map(Object)
    }
}

/// A value whose integer may be written as `5e8`.
fn value(text: &str) -> Value {
    /// Integers up to here are exact in f64.
    const LARGEST: f64 = (1u64 << 53) as f64;

    let value: Value = serde_json::from_str(text).expect("the whole file is JSON");
    match value.as_f64() {
        Some(number) if number.fract() == 0.0 && (0.0..=LARGEST).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value,
    }
}

/// The beginning of a value.
fn preview(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

impl Section {
    fn path_of(&self, key: &str) -> String {
        match self.path.as_str() {
            "" => key.to_owned(),
            path => format!("{path}.{key}"),
        }
    }

    /// The value of a key, if it is there.
    fn get<T: DeserializeOwned>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        let entry = self.entries.get(key);
        let read = entry.map(|text| T::deserialize(value(text))).transpose();
        read.map_err(|error| self.wrong_type(key, &error))
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        let text = value.into().to_string();
        self.entries.insert(key.to_owned(), text);
    }

    /// All values, by a type that has a default for each but `type`.
    fn read<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        let kind = self.entries.get_key_value("type");
        let mut some = Map::new();
        for (key, text) in kind.into_iter().chain(&self.entries) {
            // Keys are added one by one, because serde's error does not name the key.
            some.insert(key.clone(), value(text));
            if let Err(error) = T::deserialize(&Value::Object(some.clone())) {
                return Err(self.wrong_type(key, &error));
            }
        }
        T::deserialize(Value::Object(some)).map_err(|error| self.wrong_type("type", &error))
    }

    fn wrong_type(&self, key: &str, error: &serde_json::Error) -> ConfigError {
        ConfigError::WrongType {
            path: self.path_of(key),
            message: error.to_string(),
        }
    }

    fn invalid(&self, key: &str, value: impl ToString, expected: &'static str) -> ConfigError {
        ConfigError::invalid(&self.path_of(key), value, expected)
    }

    fn unsupported(&self, key: &str, value: &str, instead: &'static str) -> ConfigError {
        ConfigError::Unsupported {
            path: self.path_of(key),
            value: value.to_owned(),
            instead,
        }
    }
}

impl Reader {
    /// Treats the keys of the object at `path` by the rules of the table for `section`.
    fn open(&mut self, path: &str, text: &str, section: &str) -> Result<Section, ConfigError> {
        let Ok(Entries(found)) = serde_json::from_str(text) else {
            let place = if path.is_empty() {
                "the configuration"
            } else {
                path
            };
            return Err(ConfigError::WrongType {
                path: place.to_owned(),
                message: format!("{}, but it must be an object", preview(&value(text))),
            });
        };
        let mut opened = Section {
            path: path.to_owned(),
            entries: BTreeMap::new(),
        };
        for (index, (name, text)) in found.iter().enumerate() {
            let path = opened.path_of(name);
            if found[..index].iter().any(|(earlier, _)| earlier == name) {
                return Err(ConfigError::DuplicateKey { path });
            }
            let Some(key) = keys(section).find(|key| key.name == name) else {
                let nearest = keys(section).min_by_key(|key| damerau_levenshtein(key.name, name));
                let nearest = nearest.map(|key| key.name.to_owned());
                return Err(ConfigError::UnknownKey { path, nearest });
            };
            let value = value(text.get());
            let mut reason = key.reason;
            let is_read = ["read", "stage 3"].contains(&key.rule);
            if key.rule.starts_with("refused") {
                if !key.is_harmless(&value) {
                    return Err(opened.unsupported(name, &preview(&value), reason));
                }
                reason = "asks for nothing";
            } else if is_read && value == "auto" {
                if let Some(value) = self.auto.fill(&path)? {
                    opened.set(name, value);
                }
            } else if is_read && !value.is_null() {
                opened.entries.insert(name.clone(), text.get().to_owned());
            }
            if key.rule != "read" {
                let reason = reason.to_owned();
                self.ignored.push(IgnoredKey { path, reason });
            }
        }
        Ok(opened)
    }

    /// An object inside of `parent`, empty if it is not there.
    fn open_in(&mut self, parent: &mut Section, key: &str) -> Result<Section, ConfigError> {
        let object = parent.entries.remove(key);
        let path = parent.path_of(key);
        self.open(&path, object.as_deref().unwrap_or("{}"), &path)
    }

    fn top(&mut self, text: &str) -> Result<ZeroConfig, ConfigError> {
        let mut top = self.open("", text, "")?;
        let default = ZeroConfig::default();
        let clipping = top.get("gradient_clipping")?.or(default.gradient_clipping);
        let config = ZeroConfig {
            batch: BatchConfig {
                train_batch_size: top.get("train_batch_size")?,
                train_micro_batch_size_per_gpu: top.get("train_micro_batch_size_per_gpu")?,
                gradient_accumulation_steps: top.get("gradient_accumulation_steps")?,
            },
            gradient_clipping: clipping.filter(|norm| *norm != 0.0),
            communication_dtype: communication_dtype(&top)?.unwrap_or(default.communication_dtype),
            precision: self.precision(&mut top)?,
            ..default
        };
        let config = self.zero(&mut top, config)?;
        let optimizer = self.optimizer(&mut top)?;
        if let Some(optimizer) = &optimizer {
            self.auto.lr = Some(optimizer.lr());
        }
        let scheduler = self.scheduler(&mut top)?;
        Ok(ZeroConfig {
            optimizer,
            scheduler,
            ..config
        })
    }

    fn precision(&mut self, top: &mut Section) -> Result<Precision, ConfigError> {
        let fp16 = self.open_in(top, "fp16")?;
        let scaling = loss_scaling(&fp16)?;
        // The older name is used if the newer is missing.
        let older = self.open_in(top, "bfloat16")?.get("enabled")?;
        let bf16 = self.open_in(top, "bf16")?.get("enabled")?;
        let bf16 = bf16.or(older).unwrap_or(false);
        match (fp16.get("enabled")?.unwrap_or(false), bf16) {
            (true, true) => Err(ConfigError::Contradiction {
                first: "fp16.enabled",
                second: "bf16.enabled",
                reason: "operations compute in one of them",
            }),
            (true, false) => Ok(Precision::F16(scaling)),
            (false, true) => Ok(Precision::Bf16),
            (false, false) => Ok(Precision::F32),
        }
    }

    fn zero(&mut self, top: &mut Section, config: ZeroConfig) -> Result<ZeroConfig, ConfigError> {
        const KEY: &str = "zero_optimization";
        // The form of DeepSpeed's first releases.
        match top.entries.get(KEY).map(String::as_str) {
            Some("true") => top.set(KEY, json!({"stage": 1})),
            Some("false") => top.set(KEY, json!({})),
            _ => {}
        }
        let mut zero = self.open_in(top, KEY)?;
        let offload = self.open_in(&mut zero, "offload_optimizer")?;
        let offload_param = self.open_in(&mut zero, "offload_param")?;
        let device = offload_param.get("device")?.unwrap_or(Device::None);
        let older_on_host = zero.get("cpu_offload_param")?.unwrap_or(false);
        let reduce = zero.get("reduce_bucket_size")?;
        let gather = zero.get("allgather_bucket_size")?;
        let config = ZeroConfig {
            stage: stage(&zero)?,
            offload_optimizer: offload_optimizer(&zero, &offload)?,
            reduce_bucket_size: reduce.unwrap_or(config.reduce_bucket_size),
            allgather_bucket_size: gather.unwrap_or(config.allgather_bucket_size),
            ..config
        };
        let of_stage_3: Vec<&str> = keys(KEY)
            .filter_map(|key| (key.rule == "stage 3").then_some(key.name))
            .collect();
        zero.entries.remove("cpu_offload_param");
        zero.entries
            .retain(|name, _| of_stage_3.contains(&name.as_str()));
        let stage_3 = Stage3Config {
            offload_param: device != Device::None || older_on_host,
            ..zero.read()?
        };
        Ok(ZeroConfig { stage_3, ..config })
    }

    /// The `params` of a section with its `type` among them, which only an empty section may be without.
    fn typed(&mut self, top: &mut Section, key: &str) -> Result<Option<Section>, ConfigError> {
        let mut section = self.open_in(top, key)?;
        let params = section.entries.remove("params");
        let Some(mut name) = section.get::<String>("type")? else {
            let expected = "there, as the section has other keys";
            let missing = section.invalid("type", "missing", expected);
            return params.map_or(Ok(None), |_| Err(missing));
        };
        if key == "optimizer" {
            name.make_ascii_lowercase();
        }
        let table = format!("{key}.{name}");
        if keys(&table).next().is_none() {
            let instead = "Adam, AdamW, SGD and Adagrad, WarmupLR, WarmupDecayLR and WarmupCosineLR are read from here; build \
                           any other of Burn's in the program and leave this section out";
            return Err(section.unsupported("type", &section.entries["type"], instead));
        }
        let params = params.unwrap_or_else(|| "{}".to_owned());
        let mut params = self.open(&section.path_of("params"), &params, &table)?;
        params.set("type", name);
        Ok(Some(params))
    }

    /// In DeepSpeed `"Adam"` is AdamW unless `adam_w_mode` is false, and `"AdamW"` always is. With `torch_adam` the
    /// optimizer is PyTorch's, with the default weight decay of its AdamW.
    fn optimizer(&mut self, top: &mut Section) -> Result<Option<OptimizerConfig>, ConfigError> {
        let Some(mut params) = self.typed(top, "optimizer")? else {
            return Ok(None);
        };
        let name: Option<String> = params.get("type")?;
        let is = |kind| name.as_deref() == Some(kind);
        let decoupled = is("adamw") || is("adam") && params.get("adam_w_mode")?.unwrap_or(true);
        if decoupled {
            params.set("type", "adamw");
            let is_torchs = params.get("torch_adam")?.unwrap_or(false);
            if is_torchs && !params.entries.contains_key("weight_decay") {
                params.set("weight_decay", 0.01);
            }
        }
        params.read().map(Some)
    }

    fn scheduler(&mut self, top: &mut Section) -> Result<Option<SchedulerConfig>, ConfigError> {
        let params = self.typed(top, "scheduler")?;
        params.map(|params| params.read()).transpose()
    }
}

fn stage(zero: &Section) -> Result<Stage, ConfigError> {
    const INSTEAD: &str = "sharded parameters come later; stage 2, with offload_optimizer, is the one that needs least memory now";

    match zero.get::<u8>("stage")?.unwrap_or(0) {
        3 => Err(zero.unsupported("stage", "3", INSTEAD)),
        number => Stage::try_from(number).map_err(|_| zero.invalid("stage", number, "0, 1 or 2")),
    }
}

/// Where optimizer state or parameters are.
#[derive(Clone, Copy, Deserialize, PartialEq)]
#[serde(rename_all = "lowercase")]
enum Device {
    None,
    Cpu,
    Nvme,
}

fn offload_optimizer(zero: &Section, offload: &Section) -> Result<OptimizerOffload, ConfigError> {
    const INSTEAD: &str = "put \"cpu\": optimizer state is offloaded to host memory, not to a disk";

    let ratio: f64 = offload.get("ratio")?.unwrap_or(1.0);
    if !(0.0..=1.0).contains(&ratio) {
        return Err(offload.invalid("ratio", ratio, "from 0 to 1"));
    }
    // The form of DeepSpeed's first releases.
    let older = zero.get("cpu_offload")? == Some(true);
    match offload.get("device")? {
        Some(Device::Nvme) => Err(offload.unsupported("device", "\"nvme\"", INSTEAD)),
        Some(Device::None) if older => Err(ConfigError::Contradiction {
            first: "zero_optimization.cpu_offload",
            second: "zero_optimization.offload_optimizer.device",
            reason: "the first, the older form, asks for host memory and the second for none",
        }),
        Some(Device::Cpu) => Ok(OptimizerOffload::Host { ratio }),
        None if older => Ok(OptimizerOffload::Host { ratio }),
        Some(Device::None) | None => Ok(OptimizerOffload::None),
    }
}

fn loss_scaling(fp16: &Section) -> Result<LossScaling, ConfigError> {
    /// 2^127 is the largest power of two in f32.
    const LARGEST_POWER: u32 = 127;

    let power = fp16.get("initial_scale_power")?.unwrap_or(16);
    if power > LARGEST_POWER {
        return Err(fp16.invalid("initial_scale_power", power, "at most 127"));
    }
    let moving = LossScaling::Dynamic {
        initial_scale: 2f32.powi(power as i32),
        window: fp16.get("loss_scale_window")?.unwrap_or(1000),
        hysteresis: fp16.get("hysteresis")?.unwrap_or(2),
        min_scale: fp16.get("min_loss_scale")?.unwrap_or(1.0),
    };
    let fixed = fp16.get("loss_scale")?.filter(|scale| *scale != 0.0);
    Ok(fixed.map_or(moving, |scale| LossScaling::Fixed { scale }))
}

fn communication_dtype(top: &Section) -> Result<Option<BufferDtype>, ConfigError> {
    const KEY: &str = "communication_data_type";

    let Some(name) = top.get::<String>(KEY)? else {
        return Ok(None);
    };
    match name.to_ascii_lowercase().as_str() {
        "fp32" => Ok(Some(BufferDtype::F32)),
        "bf16" | "bfp16" => Ok(Some(BufferDtype::Bf16)),
        "fp16" => Ok(Some(BufferDtype::F16)),
        "none" => Ok(None),
        _ => Err(top.invalid(KEY, format!("{name:?}"), "\"fp32\", \"bf16\" or \"fp16\"")),
    }
}
