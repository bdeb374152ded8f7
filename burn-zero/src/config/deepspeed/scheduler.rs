//! The `scheduler` section.

use super::{Reader, keys, section::Section};
use crate::config::{ConfigError, SchedulerConfig, Warmup, WarmupShape};

impl Reader {
    pub(super) fn read_scheduler(
        &mut self,
        top: &Section<'_>,
    ) -> Result<Option<SchedulerConfig>, ConfigError> {
        let Some(section) = self.open_in(top, "scheduler", keys::TYPED)? else {
            return Ok(None);
        };
        let Some(name) = section.typed()? else {
            return Ok(None);
        };
        let config = match name {
            "WarmupLR" => self.params(&section, keys::WARMUP, warmup_lr)?,
            "WarmupDecayLR" => {
                let path = section.path_of("params");
                self.params(&section, keys::WARMUP, |params| {
                    warmup_decay(required(params, path)?)
                })?
            }
            "WarmupCosineLR" => {
                let path = section.path_of("params");
                self.params(&section, keys::COSINE, |params| {
                    warmup_cosine(required(params, path)?)
                })?
            }
            _ => {
                return Err(ConfigError::Unsupported {
                    path: section.path_of("type"),
                    value: format!("{name:?}"),
                    instead: "WarmupLR, WarmupDecayLR and WarmupCosineLR are read from here; build any other of Burn's \
                              schedulers in the program and leave this section out",
                });
            }
        };
        Ok(Some(config))
    }
}

fn required<'a, 'b>(
    params: Option<&'a Section<'b>>,
    path: String,
) -> Result<&'a Section<'b>, ConfigError> {
    params.ok_or_else(|| ConfigError::InvalidValue {
        path,
        value: "missing".to_owned(),
        expected: "an object with total_num_steps",
    })
}

fn warmup_lr(params: Option<&Section<'_>>) -> Result<SchedulerConfig, ConfigError> {
    let Some(section) = params else {
        return Ok(SchedulerConfig::WarmupLR {
            warmup: Warmup::default(),
            min_lr: 0.0,
            max_lr: None,
        });
    };
    Ok(SchedulerConfig::WarmupLR {
        warmup: warmup(section)?,
        min_lr: not_negative(section, "warmup_min_lr")?.unwrap_or(0.0),
        max_lr: not_negative(section, "warmup_max_lr")?,
    })
}

fn warmup_decay(section: &Section<'_>) -> Result<SchedulerConfig, ConfigError> {
    Ok(SchedulerConfig::WarmupDecayLR {
        warmup: warmup(section)?,
        min_lr: not_negative(section, "warmup_min_lr")?.unwrap_or(0.0),
        max_lr: not_negative(section, "warmup_max_lr")?.unwrap_or(1e-3),
        total_steps: total_steps(section)?,
    })
}

fn warmup_cosine(section: &Section<'_>) -> Result<SchedulerConfig, ConfigError> {
    Ok(SchedulerConfig::WarmupCosineLR {
        warmup: warmup(section)?,
        min_ratio: not_negative(section, "warmup_min_ratio")?.unwrap_or(0.0),
        end_ratio: not_negative(section, "cos_min_ratio")?.unwrap_or(1e-4),
        total_steps: total_steps(section)?,
    })
}

fn warmup(section: &Section<'_>) -> Result<Warmup, ConfigError> {
    let steps = section.integer("warmup_num_steps")?.unwrap_or(1000);
    if steps == 0 {
        return Err(section.invalid("warmup_num_steps", "0".to_owned(), "at least 1"));
    }
    let shape = match section.text("warmup_type")?.unwrap_or("log") {
        "log" => WarmupShape::Log,
        "linear" => WarmupShape::Linear,
        other => {
            return Err(section.invalid(
                "warmup_type",
                format!("{other:?}"),
                "\"log\" or \"linear\"",
            ));
        }
    };
    Ok(Warmup { steps, shape })
}

fn total_steps(section: &Section<'_>) -> Result<u64, ConfigError> {
    let missing = || {
        section.invalid(
            "total_num_steps",
            "missing".to_owned(),
            "all updates of the training",
        )
    };
    section.integer("total_num_steps")?.ok_or_else(missing)
}

fn not_negative(section: &Section<'_>, key: &str) -> Result<Option<f64>, ConfigError> {
    match section.number(key)? {
        Some(value) if value < 0.0 => Err(section.invalid(key, value.to_string(), "not negative")),
        value => Ok(value),
    }
}
