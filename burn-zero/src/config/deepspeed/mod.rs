//! Reads DeepSpeed's JSON.

mod json;
mod keys;
mod optimizer;
mod scheduler;
mod section;
#[cfg(test)]
mod tests;

use json::Json;
use section::{Keys, Section};

use super::{BatchConfig, ConfigError, LossScaling, OptimizerOffload, Precision, ZeroConfig};
use crate::Stage;
use crate::group::BufferDtype;

/// The configuration of a file, its numbers not yet checked against each other.
pub(super) fn read(text: &str) -> Result<ZeroConfig, ConfigError> {
    let json: Json = serde_json::from_str(text).map_err(|error| ConfigError::Syntax {
        message: error.to_string(),
    })?;
    let mut reader = Reader {
        config: ZeroConfig::default(),
    };
    reader.read_top(&json)?;
    Ok(reader.config)
}

/// Fills a configuration that begins with the defaults.
struct Reader {
    config: ZeroConfig,
}

impl Reader {
    fn open<'a>(
        &mut self,
        path: &str,
        json: &'a Json,
        keys: Keys,
    ) -> Result<Section<'a>, ConfigError> {
        Section::open(path, json, keys, &mut self.config.ignored)
    }

    /// An object inside of `parent`, unless it is missing or null.
    fn open_in<'a>(
        &mut self,
        parent: &Section<'a>,
        key: &str,
        keys: Keys,
    ) -> Result<Option<Section<'a>>, ConfigError> {
        let Some(json) = parent.value(key) else {
            return Ok(None);
        };
        self.open(&parent.path_of(key), json, keys).map(Some)
    }

    fn read_top(&mut self, json: &Json) -> Result<(), ConfigError> {
        let top = self.open("", json, keys::TOP)?;
        self.config.batch = BatchConfig {
            train_batch_size: top.integer("train_batch_size")?,
            train_micro_batch_size_per_gpu: top.integer("train_micro_batch_size_per_gpu")?,
            gradient_accumulation_steps: top.integer("gradient_accumulation_steps")?,
        };
        self.config.gradient_clipping =
            top.number("gradient_clipping")?.filter(|norm| *norm != 0.0);
        if let Some(dtype) = communication_dtype(&top)? {
            self.config.communication_dtype = dtype;
        }
        self.config.precision = self.read_precision(&top)?;
        self.read_zero(&top)?;
        self.config.optimizer = self.read_optimizer(&top)?;
        self.config.scheduler = self.read_scheduler(&top)?;
        Ok(())
    }

    fn read_precision(&mut self, top: &Section<'_>) -> Result<Precision, ConfigError> {
        let fp16 = self.read_fp16(top)?;
        let bf16 = self.read_bf16(top, "bf16")?;
        let old = self.read_bf16(top, "bfloat16")?;
        if bf16.is_some() && old.is_some() {
            return Err(ConfigError::Contradiction {
                first: "bf16",
                second: "bfloat16",
                reason: "one is the older name of the other",
            });
        }
        let bf16 = bf16.or(old) == Some(true);
        match fp16 {
            Some(_) if bf16 => Err(ConfigError::Contradiction {
                first: "fp16.enabled",
                second: "bf16.enabled",
                reason: "operations compute in one of them",
            }),
            Some(scaling) => Ok(Precision::F16(scaling)),
            None if bf16 => Ok(Precision::Bf16),
            None => Ok(Precision::F32),
        }
    }

    /// How losses are scaled, if f16 is enabled.
    fn read_fp16(&mut self, top: &Section<'_>) -> Result<Option<LossScaling>, ConfigError> {
        let Some(section) = self.open_in(top, "fp16", keys::FP16)? else {
            return Ok(None);
        };
        let scaling = loss_scaling(&section)?;
        let enabled = section.bool("enabled")?.unwrap_or(false);
        Ok(enabled.then_some(scaling))
    }

    fn read_bf16(&mut self, top: &Section<'_>, key: &str) -> Result<Option<bool>, ConfigError> {
        let Some(section) = self.open_in(top, key, keys::BF16)? else {
            return Ok(None);
        };
        Ok(Some(section.bool("enabled")?.unwrap_or(false)))
    }

    fn read_zero(&mut self, top: &Section<'_>) -> Result<(), ConfigError> {
        // The form of DeepSpeed's first releases.
        if let Some(Json::Bool(enabled)) = top.value("zero_optimization") {
            self.config.stage = if *enabled {
                Stage::OptimizerState
            } else {
                Stage::DataParallel
            };
            return Ok(());
        }
        let Some(zero) = self.open_in(top, "zero_optimization", keys::ZERO)? else {
            return Ok(());
        };
        self.config.stage = stage(&zero)?;
        if let Some(size) = zero.integer("reduce_bucket_size")? {
            self.config.reduce_bucket_size = size;
        }
        if let Some(size) = zero.integer("allgather_bucket_size")? {
            self.config.allgather_bucket_size = size;
        }
        let section = self.open_in(&zero, "offload_optimizer", keys::OFFLOAD)?;
        let named = section.as_ref().map(offload).transpose()?;
        // The form of DeepSpeed's first releases, once more.
        let older = zero.bool("cpu_offload")? == Some(true);
        self.config.offload_optimizer = match (older, named) {
            (true, Some(OptimizerOffload::None)) => {
                return Err(ConfigError::Contradiction {
                    first: "zero_optimization.cpu_offload",
                    second: "zero_optimization.offload_optimizer.device",
                    reason: "the first, the older form, asks for host memory and the second for none",
                });
            }
            (_, Some(named)) => named,
            (true, None) => OptimizerOffload::Host { ratio: 1.0 },
            (false, None) => OptimizerOffload::None,
        };
        Ok(())
    }
}

fn stage(zero: &Section<'_>) -> Result<Stage, ConfigError> {
    match zero.integer("stage")?.unwrap_or(0) {
        0 => Ok(Stage::DataParallel),
        1 => Ok(Stage::OptimizerState),
        2 => Ok(Stage::Gradients),
        3 => Err(ConfigError::Unsupported {
            path: zero.path_of("stage"),
            value: "3".to_owned(),
            instead: "sharded parameters come later; stage 2, with offload_optimizer, is the one that needs least memory now",
        }),
        other => Err(zero.invalid("stage", other.to_string(), "0, 1 or 2")),
    }
}

fn offload(section: &Section<'_>) -> Result<OptimizerOffload, ConfigError> {
    let ratio = section.number("ratio")?.unwrap_or(1.0);
    if !(0.0..=1.0).contains(&ratio) {
        return Err(section.invalid("ratio", ratio.to_string(), "from 0 to 1"));
    }
    match section.text("device")?.unwrap_or("none") {
        "none" => Ok(OptimizerOffload::None),
        "cpu" => Ok(OptimizerOffload::Host { ratio }),
        "nvme" => Err(ConfigError::Unsupported {
            path: section.path_of("device"),
            value: "\"nvme\"".to_owned(),
            instead: "put \"cpu\": optimizer state is offloaded to host memory, not to a disk",
        }),
        other => Err(section.invalid("device", format!("{other:?}"), "\"none\" or \"cpu\"")),
    }
}

fn loss_scaling(fp16: &Section<'_>) -> Result<LossScaling, ConfigError> {
    /// 2^127 is the largest power of two in f32.
    const LARGEST_POWER: u32 = 127;

    let power = fp16.small_integer("initial_scale_power")?.unwrap_or(16);
    if power > LARGEST_POWER {
        return Err(fp16.invalid("initial_scale_power", power.to_string(), "at most 127"));
    }
    let moving = LossScaling::Dynamic {
        initial_scale: 2f32.powi(power as i32),
        window: fp16.small_integer("loss_scale_window")?.unwrap_or(1000),
        hysteresis: fp16.small_integer("hysteresis")?.unwrap_or(2),
        min_scale: fp16.number("min_loss_scale")?.unwrap_or(1.0) as f32,
    };
    match fp16.number("loss_scale")? {
        None | Some(0.0) => Ok(moving),
        Some(scale) => Ok(LossScaling::Fixed {
            scale: scale as f32,
        }),
    }
}

fn communication_dtype(top: &Section<'_>) -> Result<Option<BufferDtype>, ConfigError> {
    const KEY: &str = "communication_data_type";

    let Some(name) = top.text(KEY)? else {
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
