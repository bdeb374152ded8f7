//! LoRA (Hu et al., arXiv 2106.09685): adapters of the blocks' linear layers, from and to the files
//! of PEFT.

use std::path::{Path, PathBuf};

use burn::prelude::*;
use burn_zero::TensorFile;
use serde_json::{Map, Value, json};

use super::projection::Adapter;
use super::{Llm, LlmError};

/// PEFT's file of settings.
pub(crate) const SETTINGS: &str = "adapter_config.json";
/// PEFT's file of adapters.
pub(super) const WEIGHTS: &str = "adapter_model.safetensors";

/// The target that stands for all linear layers of the blocks.
pub const ALL_LINEAR: &str = "all-linear";

/// Which layers are adapted, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct LoraConfig {
    /// Features between the two matrices of an adapter.
    pub rank: usize,
    /// What an adapter adds is multiplied with this over the rank.
    pub alpha: f64,
    /// Probability that a feature that an adapter reads is dropped in training.
    pub dropout: f64,
    /// Whether `alpha` is divided by the root of the rank instead (rsLoRA: Kalajdzievski, arXiv
    /// 2312.03732).
    pub is_rank_stabilized: bool,
}

impl LoraConfig {
    /// What an adapter's product is multiplied with.
    pub fn scale(&self) -> f64 {
        let rank = self.rank as f64;
        self.alpha
            / if self.is_rank_stabilized {
                rank.sqrt()
            } else {
                rank
            }
    }
}

/// Whether PEFT's `target_modules` with this entry has the layer at a path.
fn is_target(target: &str, path: &str) -> bool {
    let is_end = |end: &str| end.is_empty() || end.ends_with('.');
    target == ALL_LINEAR || path.strip_suffix(target).is_some_and(is_end)
}

/// The path in PEFT's files of a layer of the model.
fn in_file(path: &str, matrix: &str) -> String {
    format!("base_model.model.{path}.{matrix}.weight")
}

/// The name in PEFT's files of an adapter's matrix at a path of the model; `None` for another
/// parameter.
pub(super) fn adapter_name(path: &str) -> Option<String> {
    let matrix = |end, matrix| Some(in_file(path.strip_suffix(end)?, matrix));
    matrix(".lora.a", "lora_A").or_else(|| matrix(".lora.b", "lora_B"))
}

impl<B: Backend> Llm<B> {
    /// Freezes the model, and gives its layers new adapters, which are trained. Each target is, as
    /// PEFT's `target_modules`, a layer's path or its end (`q_proj`, `layers.0.mlp.up_proj`), or
    /// `all-linear`: all linear layers of the blocks.
    ///
    /// # Errors
    ///
    /// [`LlmError::NoParameter`] for a target that matches no linear layer of the blocks.
    pub fn with_lora(self, config: &LoraConfig, targets: &[String]) -> Result<Self, LlmError> {
        let mut model = self.frozen();
        let mut is_found = vec![false; targets.len()];
        for (path, projection) in model.projections_mut() {
            let mut is_adapted = false;
            for (target, is_found) in targets.iter().zip(&mut is_found) {
                if is_target(target, &path) {
                    (*is_found, is_adapted) = (true, true);
                }
            }
            if is_adapted {
                let adapter = Adapter::drawn(config, projection.sizes(), &projection.device());
                projection.set_adapter(adapter);
            }
        }
        let missing = targets.iter().zip(is_found).find(|(_, is_found)| !is_found);
        match missing {
            None => Ok(model.adapted(config)),
            Some((target, _)) => Err(LlmError::NoParameter {
                pattern: target.clone(),
                instead: "a target is the path, or its end, of a linear layer of the blocks: q_proj, k_proj, v_proj, \
                          o_proj, gate_proj, up_proj, down_proj; or all-linear",
            }),
        }
    }

    /// Freezes the model, and gives its layers the adapters of a directory that PEFT or
    /// [`write_adapter`](Self::write_adapter) has written. They are trained.
    ///
    /// # Errors
    ///
    /// A file that cannot be read; settings beyond those of [`LoraConfig`]; an adapter of a layer
    /// that the model has not, or has in another size.
    pub fn with_adapter(self, folder: &Path) -> Result<Self, LlmError> {
        let config = read_settings(&folder.join(SETTINGS))?;
        let file = TensorFile::open(&folder.join(WEIGHTS))?;
        let refused = |reason| LlmError::OtherModel {
            folder: folder.to_owned(),
            reason,
        };
        let mut unread: Vec<_> = file.names().map(str::to_owned).collect();
        let mut model = self.frozen();
        for (path, projection) in model.projections_mut() {
            let names = ["lora_A", "lora_B"].map(|matrix| in_file(&path, matrix));
            if names.iter().all(|name| file.shape(name).is_none()) {
                continue;
            }
            let [inputs, outputs] = projection.sizes();
            let expected = [[config.rank, inputs], [outputs, config.rank]];
            let device = projection.device();
            let mut matrices = Vec::new();
            for (name, expected) in names.iter().zip(expected) {
                let found = file.shape(name);
                if found != Some(&expected[..]) {
                    let found =
                        found.map_or("lacks".to_owned(), |shape| format!("has {shape:?} as"));
                    return Err(refused(format!(
                        "{found} {name}, which is {expected:?} in the model"
                    )));
                }
                let data = file.read(name)?.convert::<f32>();
                matrices.push(Tensor::<B, 2>::from_data(data, &device).swap_dims(0, 1));
            }
            unread.retain(|name| !names.contains(name));
            let [a, b] = matrices.try_into().expect("an adapter has two matrices");
            projection.set_adapter(Adapter::new(&config, a, b));
        }
        match unread.first() {
            None => Ok(model.adapted(&config)),
            Some(name) => Err(refused(format!("has {name}, which the model has not"))),
        }
    }

    /// Writes the adapters as PEFT does. `base` is what they belong to. Where ranks share the
    /// parameters all of them call this, and one has a directory to write to.
    ///
    /// # Errors
    ///
    /// A file that cannot be written.
    ///
    /// # Panics
    ///
    /// A model without adapters.
    pub fn write_adapter(&self, base: &Path, to: Option<&Path>) -> Result<(), LlmError> {
        let config = self.lora().expect("a model with adapters");
        super::write::write_adapters(self, to)?;
        let Some(to) = to else {
            return Ok(());
        };
        let settings = json!({
            "base_model_name_or_path": base.display().to_string(),
            "bias": "none",
            "fan_in_fan_out": false,
            "inference_mode": true,
            "init_lora_weights": true,
            "lora_alpha": number(config.alpha),
            "lora_dropout": config.dropout,
            "modules_to_save": null,
            "peft_type": "LORA",
            "r": config.rank,
            "target_modules": self.target_modules(),
            "task_type": "CAUSAL_LM",
            "use_dora": false,
            "use_rslora": config.is_rank_stabilized,
        });
        let text = serde_json::to_string_pretty(&settings).expect("settings are plain data");
        Ok(fs_err::write(to.join(SETTINGS), text + "\n")?)
    }

    /// The adapted layers: the ends of their paths if these are adapted in every block, else the
    /// paths.
    pub fn target_modules(&self) -> Vec<String> {
        let projections = self.projections();
        let end = |path: &str| path.rsplit('.').next().unwrap_or_default().to_owned();
        let adapted = projections
            .iter()
            .filter(|(_, layer)| layer.adapter().is_some());
        let paths: Vec<_> = adapted.map(|(path, _)| path.clone()).collect();
        let mut ends: Vec<_> = paths.iter().map(|path| end(path)).collect();
        ends.sort_unstable();
        ends.dedup();
        let mut of_these_ends = projections
            .iter()
            .filter(|(path, _)| ends.contains(&end(path)));
        if of_these_ends.all(|(_, layer)| layer.adapter().is_some()) {
            ends
        } else {
            paths
        }
    }
}

/// PEFT writes whole numbers as such.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 1e9 {
        json!(value as i64)
    } else {
        json!(value)
    }
}

/// Settings of PEFT that change what an adapter computes or where it is, beyond a [`LoraConfig`].
const UNSUPPORTED: [&str; 13] = [
    "alora_invocation_tokens",
    "alpha_pattern",
    "bias",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_dora",
    "use_qalora",
];

/// Whether a setting says that something is not used.
fn is_off(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text == "none",
        Value::Array(values) => values.is_empty(),
        Value::Object(values) => values.is_empty(),
        Value::Bool(true) | Value::Number(_) => false,
    }
}

fn read_settings(path: &PathBuf) -> Result<LoraConfig, LlmError> {
    let refused = |reason: String| LlmError::Json {
        path: path.clone(),
        reason,
    };
    let text = fs_err::read_to_string(path)?;
    let settings: Map<String, Value> =
        serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
    let unsupported = |key, value: &Value, instead| LlmError::Unsupported {
        path: path.clone(),
        key,
        value: value.to_string(),
        instead,
    };
    let kind = settings.get("peft_type").unwrap_or(&Value::Null);
    if kind != "LORA" {
        return Err(unsupported("peft_type", kind, "there is LORA"));
    }
    for key in UNSUPPORTED {
        if let Some(value) = settings.get(key).filter(|value| !is_off(value)) {
            let instead = "there are rank, alpha, dropout and use_rslora";
            return Err(unsupported(key, value, instead));
        }
    }
    // The others (PiSSA, OLoRA, ..) have changed the weights of the model too.
    let begins = settings.get("init_lora_weights").unwrap_or(&Value::Null);
    let keeps_the_model = match begins {
        Value::String(name) => matches!(name.as_str(), "gaussian" | "eva" | "orthogonal"),
        _ => true,
    };
    if !keeps_the_model {
        let instead = "its adapters are for a model that was changed when they were made: convert them with PEFT";
        return Err(unsupported("init_lora_weights", begins, instead));
    }
    let number = |key: &str| settings.get(key).and_then(Value::as_f64);
    let lacks = |key: &str| refused(format!("lacks {key}, which is a number above 0"));
    let positive = |key: &str| {
        number(key)
            .filter(|value| *value > 0.0)
            .ok_or_else(|| lacks(key))
    };
    let dropout = number("lora_dropout").unwrap_or(0.0);
    if !(0.0..1.0).contains(&dropout) {
        return Err(refused(format!(
            "lora_dropout is {dropout}: it is at least 0 and below 1"
        )));
    }
    Ok(LoraConfig {
        rank: positive("r")? as usize,
        alpha: positive("lora_alpha")?,
        dropout,
        is_rank_stabilized: settings.get("use_rslora") == Some(&Value::Bool(true)),
    })
}

#[cfg(test)]
mod tests {
    use super::is_target;

    #[test]
    fn a_target_is_a_path_or_its_end_at_a_dot() {
        let path = "model.layers.11.mlp.up_proj";
        for target in [
            path,
            "up_proj",
            "mlp.up_proj",
            "11.mlp.up_proj",
            "all-linear",
        ] {
            assert!(is_target(target, path), "{target}");
        }
        for target in ["proj", "1.mlp.up_proj", "mlp", "up_proj.weight"] {
            assert!(!is_target(target, path), "{target}");
        }
    }
}
