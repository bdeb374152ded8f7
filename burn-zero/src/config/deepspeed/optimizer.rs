//! The `optimizer` section.

use super::{
    Reader, keys,
    section::{Keys, Section},
};
use crate::config::{AdagradParams, AdamParams, ConfigError, OptimizerConfig, SgdParams};

impl Reader {
    pub(super) fn read_optimizer(
        &mut self,
        top: &Section<'_>,
    ) -> Result<Option<OptimizerConfig>, ConfigError> {
        let Some(section) = self.open_in(top, "optimizer", keys::TYPED)? else {
            return Ok(None);
        };
        let Some(name) = section.typed()? else {
            return Ok(None);
        };
        let config = match name.to_ascii_lowercase().as_str() {
            "adam" => self.params(&section, keys::ADAM, |params| adam(params, false))?,
            "adamw" => self.params(&section, keys::ADAM, |params| adam(params, true))?,
            "sgd" => self.params(&section, keys::SGD, sgd)?,
            "adagrad" => self.params(&section, keys::ADAGRAD, adagrad)?,
            _ => {
                return Err(ConfigError::Unsupported {
                    path: section.path_of("type"),
                    value: format!("{name:?}"),
                    instead: "Adam, AdamW, SGD and Adagrad are read from here; build any other of Burn's optimizers in the \
                              program and leave this section out",
                });
            }
        };
        Ok(Some(config))
    }

    /// Reads `params`, or the defaults where there are none.
    pub(super) fn params<T>(
        &mut self,
        section: &Section<'_>,
        keys: Keys,
        read: impl FnOnce(Option<&Section<'_>>) -> Result<T, ConfigError>,
    ) -> Result<T, ConfigError> {
        let params = self.open_in(section, "params", keys)?;
        read(params.as_ref())
    }
}

/// DeepSpeed makes AdamW of `"Adam"` unless `adam_w_mode` is false, and of `"AdamW"` whatever it is.
fn adam(
    params: Option<&Section<'_>>,
    always_decoupled: bool,
) -> Result<OptimizerConfig, ConfigError> {
    let default = AdamParams::default();
    let Some(section) = params else {
        return Ok(OptimizerConfig::AdamW(default));
    };
    let params = AdamParams {
        lr: section.number("lr")?.unwrap_or(default.lr),
        betas: section.pair("betas")?.unwrap_or(default.betas),
        eps: section.number("eps")?.unwrap_or(default.eps),
        weight_decay: section
            .number("weight_decay")?
            .unwrap_or(default.weight_decay),
    };
    let decoupled = section.bool("adam_w_mode")?.unwrap_or(true) || always_decoupled;
    Ok(if decoupled {
        OptimizerConfig::AdamW(params)
    } else {
        OptimizerConfig::Adam(params)
    })
}

fn sgd(params: Option<&Section<'_>>) -> Result<OptimizerConfig, ConfigError> {
    let default = SgdParams::default();
    let Some(section) = params else {
        return Ok(OptimizerConfig::Sgd(default));
    };
    Ok(OptimizerConfig::Sgd(SgdParams {
        lr: section.number("lr")?.unwrap_or(default.lr),
        momentum: section.number("momentum")?.unwrap_or(default.momentum),
        dampening: section.number("dampening")?.unwrap_or(default.dampening),
        nesterov: section.bool("nesterov")?.unwrap_or(default.nesterov),
        weight_decay: section
            .number("weight_decay")?
            .unwrap_or(default.weight_decay),
    }))
}

fn adagrad(params: Option<&Section<'_>>) -> Result<OptimizerConfig, ConfigError> {
    let default = AdagradParams::default();
    let Some(section) = params else {
        return Ok(OptimizerConfig::Adagrad(default));
    };
    Ok(OptimizerConfig::Adagrad(AdagradParams {
        lr: section.number("lr")?.unwrap_or(default.lr),
        eps: section.number("eps")?.unwrap_or(default.eps),
        weight_decay: section
            .number("weight_decay")?
            .unwrap_or(default.weight_decay),
    }))
}
