//! Reads DeepSpeed's JSON: the table of keys lists which keys are read, and serde deserializes
//! their values.

use std::collections::BTreeMap;
use std::fmt;

use burn_ranks::BufferDtype;
use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, MapAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};
use strsim::damerau_levenshtein;

use super::keys::{Treatment, key, keys};
use super::{BatchConfig, MICRO, STEPS, TRAIN, ZeroConfig};
use crate::error::ConfigFault;
use crate::error::ZeroError;
use crate::settings::{Memory, Stage};

impl ZeroConfig {
    /// Reads DeepSpeed's JSON (`ds_config.json`) of ZeRO stage 0, 1, 2 or 3: integers may be
    /// written as `5e8`, `null` is the default, and keys without effect here are listed in
    /// [`ignored`](Self::ignored) with the reason. `"auto"` is the default where Accelerate and
    /// DeepSpeed take one: for batch sizes (they count as missing), `gradient_clipping` and the
    /// sizes of buckets.
    ///
    /// # Errors
    ///
    /// Text that is not JSON, a duplicate key, an `"auto"` that only the program can fill in;
    /// outside of [`sections`](Self::sections) an unknown key, a wrong type or value, and features
    /// of DeepSpeed that this crate does not have, such as NVMe.
    pub fn from_deepspeed_json(text: &str) -> Result<Self, ZeroError> {
        Self::from_deepspeed_json_with(text, &|_| None)
    }

    /// Reads DeepSpeed's JSON. `auto` returns the value of a key that is `"auto"` in the file, by
    /// its path, from the program's options or its model; null leaves the key out, and integers may
    /// be floats such as `5e8`.
    ///
    /// ```
    /// use burn_zero::ZeroConfig;
    ///
    /// let file = r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto",
    ///     "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_micro_batch_size_per_gpu": "auto"}"#;
    /// let error = ZeroConfig::from_deepspeed_json(file).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "optimizer.params.lr: \"auto\", and nothing fills it in: let the program give it, or put a value there",
    /// );
    /// let hidden_size = 768;
    /// let auto = |path: &str| match path {
    ///     "optimizer.params.lr" => Some(3e-4.into()),
    ///     "zero_optimization.reduce_bucket_size" => Some((hidden_size * hidden_size).into()), // as Transformers does
    ///     _ => None,
    /// };
    /// let config = ZeroConfig::from_deepspeed_json_with(file, &auto)?;
    /// assert_eq!(config.sections["optimizer"]["params"]["lr"], 3e-4);
    /// assert_eq!((config.reduce_bucket_size, config.gradient_clipping), (768 * 768, Some(1.0)));
    /// # Ok::<(), burn_zero::ZeroError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`from_deepspeed_json`](Self::from_deepspeed_json).
    pub fn from_deepspeed_json_with(
        text: &str,
        auto: &dyn Fn(&str) -> Option<Value>,
    ) -> Result<Self, ZeroError> {
        let file: Value =
            serde_json::from_str(text).map_err(|error| ConfigFault::Syntax(error.to_string()))?;
        refuse_doubled(text, "")?;
        let mut reader = Reader {
            auto,
            ignored: BTreeMap::new(),
        };
        let mut top = reader.section("", file)?;
        let default = ZeroConfig::default();
        let clipping = top.take("gradient_clipping")?;
        let clipping = clipping.or(default.gradient_clipping);
        let clipping = clipping.filter(|norm: &f64| *norm != 0.0);
        if let Some(norm) = clipping {
            let key = "gradient_clipping";
            ConfigFault::require(norm > 0.0, key, norm, "finite and above 0")?;
        }
        let mut zero = top.take_section("zero_optimization");
        let stage = stage(&mut zero)?;
        let offload_param = match stage {
            Stage::Parameters => memory(&mut zero, "offload_param", "cpu_offload_param")?,
            _ => {
                for key in ["offload_param", "cpu_offload_param"] {
                    if zero.entries.remove(key).is_some() {
                        let reason = "of stage 3, as in DeepSpeed".to_owned();
                        reader.ignored.insert(zero.path_of(key), reason);
                    }
                }
                None
            }
        };
        let mut bucket_size = |key| {
            let size = zero.take(key)?.unwrap_or(default.reduce_bucket_size);
            ConfigFault::require(size > 0, &zero.path_of(key), size, "at least 1")?;
            Ok::<_, ConfigFault>(size)
        };
        Ok(ZeroConfig {
            reduce_bucket_size: bucket_size("reduce_bucket_size")?,
            allgather_bucket_size: bucket_size("allgather_bucket_size")?,
            stage,
            offload_optimizer: memory(&mut zero, "offload_optimizer", "cpu_offload")?
                .unwrap_or(default.offload_optimizer),
            offload_param: offload_param.unwrap_or(default.offload_param),
            shards: offload_param.unwrap_or(default.shards),
            batch: BatchConfig {
                train_batch_size: top.take(TRAIN)?,
                train_micro_batch_size_per_gpu: top.take(MICRO)?,
                gradient_accumulation_steps: top.take(STEPS)?,
            },
            gradient_clipping: clipping,
            communication_dtype: communication_dtype(&mut top)?
                .unwrap_or(default.communication_dtype),
            sections: sections(top),
            ignored: reader.ignored,
        })
    }
}

fn stage(zero: &mut Section) -> Result<Stage, ConfigFault> {
    let number = zero.take("stage")?;
    let number = number.unwrap_or(ZeroConfig::DEFAULT_STAGE.number());
    Stage::try_from(number)
        .map_err(|_| ConfigFault::invalid(&zero.path_of("stage"), number, "0, 1, 2 or 3"))
}

/// The memory that an offload section chooses by its `device`, or `older`, the boolean key that is
/// its older form; `None` if neither says one.
fn memory(zero: &mut Section, section: &str, older: &str) -> Result<Option<Memory>, ConfigFault> {
    const INSTEAD: &str = "put \"cpu\": what is offloaded is in host memory, not on a disk";

    #[derive(Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Device {
        None,
        Cpu,
        Nvme,
    }
    // The form of DeepSpeed's first releases.
    let (older, asks) = (zero.path_of(older), zero.take(older)? == Some(true));
    let mut offload = zero.take_section(section);
    match (offload.take("device")?, asks) {
        (Some(Device::Nvme), _) => Err(ConfigFault::unsupported(
            offload.path_of("device"),
            "\"nvme\"",
            INSTEAD,
        )),
        (Some(Device::None), true) => Err(ConfigFault::key(
            offload.path_of("device"),
            format!("none, but {older}, the older form, asks for host memory"),
        )),
        (Some(Device::Cpu), _) | (None, true) => Ok(Some(Memory::Host)),
        (Some(Device::None), false) => Ok(Some(Memory::Device)),
        (None, false) => Ok(None),
    }
}

fn communication_dtype(top: &mut Section) -> Result<Option<BufferDtype>, ConfigFault> {
    const KEY: &str = "communication_data_type";

    let name = top.take::<String>(KEY)?;
    let name = name.map(|name| name.to_ascii_lowercase());
    match name.as_deref() {
        None | Some("none") => Ok(None),
        Some("fp32") => Ok(Some(BufferDtype::F32)),
        Some("bf16" | "bfp16") => Ok(Some(BufferDtype::Bf16)),
        Some("fp16") => Ok(Some(BufferDtype::F16)),
        Some(name) => {
            let expected = "\"fp32\", \"bf16\" or \"fp16\"";
            Err(ConfigFault::invalid(KEY, format!("{name:?}"), expected))
        }
    }
}

/// The remaining entries, which the program reads. `bfloat16` is an older name of `bf16`: a key
/// that both have is taken from `bf16`. Of the two the program gets the one that is no object, to
/// refuse it.
fn sections(top: Section) -> BTreeMap<String, Value> {
    let mut entries = top.entries;
    if let Some(older) = entries.remove("bfloat16") {
        let bf16 = match (older, entries.remove("bf16")) {
            (Value::Object(mut older), Some(Value::Object(newer))) => {
                older.extend(newer);
                older.into()
            }
            (Value::Object(_), Some(newer)) => newer,
            (older, _) => older,
        };
        entries.insert("bf16".to_owned(), bf16);
    }
    entries.into_iter().collect()
}

/// The keys of an object that are read: with `"auto"` filled in, without those that are null.
struct Section {
    path: String,
    entries: Map<String, Value>,
}

impl Section {
    fn path_of(&self, key: &str) -> String {
        join(&self.path, key)
    }

    /// Removes a key and returns its value, if it is there.
    fn take<T: DeserializeOwned>(&mut self, key: &str) -> Result<Option<T>, ConfigFault> {
        let value = self.entries.remove(key);
        let read = value.map(T::deserialize).transpose();
        read.map_err(|error| ConfigFault::key(self.path_of(key), error.to_string()))
    }

    /// Removes a section and returns it; an empty one if it is not there.
    fn take_section(&mut self, key: &str) -> Section {
        let path = self.path_of(key);
        match self.entries.remove(key) {
            Some(Value::Object(entries)) => Self { path, entries },
            _ => Self {
                path,
                entries: Map::new(),
            },
        }
    }
}

struct Reader<'a> {
    auto: &'a dyn Fn(&str) -> Option<Value>,
    ignored: BTreeMap<String, String>,
}

impl Reader<'_> {
    /// Applies the rules of the table to the keys of the object at `path`.
    fn section(&mut self, path: &str, object: Value) -> Result<Section, ConfigFault> {
        let found = match object {
            Value::Object(found) => found,
            // The form of DeepSpeed's first releases.
            Value::Bool(on) if path == "zero_optimization" => {
                Map::from_iter([("stage".to_owned(), u8::from(on).into())])
            }
            other => {
                let place = if path.is_empty() {
                    "the configuration"
                } else {
                    path
                };
                let reason = format!("{}, but it must be an object", preview(&other));
                return Err(ConfigFault::key(place, reason));
            }
        };
        let mut read = Section {
            path: path.to_owned(),
            entries: Map::new(),
        };
        for (name, value) in found {
            let (section, path) = (path, read.path_of(&name));
            let Some(key) = key(section, &name) else {
                let near = keys(section).min_by_key(|key| damerau_levenshtein(key.name, &name));
                let near = near.map_or("", |key| key.name);
                let reason = format!("there is no such key; the nearest is `{near}`");
                return Err(ConfigFault::key(path, reason));
            };
            let value = whole(value);
            let value = match key.treatment {
                Treatment::Section if value.is_null() => None,
                Treatment::Section => Some(self.section(&path, value)?.entries.into()),
                Treatment::Ignored => {
                    self.ignored.insert(path, key.reason.to_owned());
                    None
                }
                Treatment::ReadOrDefault if value == "auto" => self.auto(&path),
                Treatment::Read | Treatment::ReadOrDefault => Some(self.filled(&path, value)?),
                Treatment::Refused(harmless) if harmless.has(&value) => {
                    self.ignored.insert(path, "asks for nothing".to_owned());
                    None
                }
                Treatment::Refused(_) => {
                    return Err(ConfigFault::unsupported(path, &preview(&value), key.reason));
                }
            };
            if let Some(value) = value.filter(|value| !value.is_null()) {
                read.entries.insert(name, value);
            }
        }
        Ok(read)
    }

    /// The program's value for `"auto"`.
    fn auto(&self, path: &str) -> Option<Value> {
        (self.auto)(path).map(whole)
    }

    /// The value with `"auto"` filled in, on all levels of an object, and without the object's
    /// nulls.
    fn filled(&self, path: &str, value: Value) -> Result<Value, ConfigFault> {
        const NOT_FILLED: &str =
            "\"auto\", and nothing fills it in: let the program give it, or put a value there";

        if value == "auto" {
            return self
                .auto(path)
                .ok_or_else(|| ConfigFault::key(path, NOT_FILLED));
        }
        let Value::Object(entries) = value else {
            return Ok(whole(value));
        };
        let mut filled = Map::new();
        for (key, value) in entries {
            let value = self.filled(&join(path, &key), value)?;
            filled.extend(Some((key, value)).filter(|(_, value)| !value.is_null()));
        }
        Ok(filled.into())
    }
}

fn join(path: &str, key: &str) -> String {
    match path {
        "" => key.to_owned(),
        path => format!("{path}.{key}"),
    }
}

/// Converts a number without a fraction, such as `5e8`, to an integer; returns every other value as
/// it is.
fn whole(value: Value) -> Value {
    /// Integers up to here are exact in f64.
    const LARGEST: f64 = (1u64 << 53) as f64;

    match value.as_f64() {
        Some(number) if number.fract() == 0.0 && (0.0..=LARGEST).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value,
    }
}

/// The beginning of a value.
pub(super) fn preview(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text,
    }
}

/// Refuses a key that occurs twice in its object: `serde_json::Value` would drop one of its values.
fn refuse_doubled(text: &str, path: &str) -> Result<(), ConfigFault> {
    let Ok(Entries(entries)) = serde_json::from_str(text) else {
        return Ok(());
    };
    for (index, (key, value)) in entries.iter().enumerate() {
        let path = join(path, key);
        if entries[..index].iter().any(|(earlier, _)| earlier == key) {
            return Err(ConfigFault::key(path, "the key stands there twice"));
        }
        refuse_doubled(value.get(), &path)?;
    }
    Ok(())
}

/// Keys and values of an object in their order.
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
