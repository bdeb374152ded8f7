//! What the command line and the model say where a DeepSpeed file says `"auto"`.

use std::path::Path;

use burn_zero::{ConfigFault, DeepSpeedConfig, HostAdamWConfig, ZeroError};
use serde_json::{Value, json};

use super::error::TrainingError;
use super::precision::Amp;

/// The values for the file's `"auto"`.
#[derive(Clone, Debug)]
pub struct Auto {
    /// What `--amp` says.
    pub amp: Option<Amp>,
    /// The highest learning rate.
    pub lr: f64,
    /// AdamW's numbers.
    pub adamw: HostAdamWConfig,
    /// Features of a token.
    pub width: usize,
}

impl Auto {
    fn value(&self, key: &str) -> Option<Value> {
        let adamw = &self.adamw;
        Some(match key {
            "fp16.enabled" => json!(self.amp == Some(Amp::F16)),
            "bf16.enabled" | "bfloat16.enabled" => json!(self.amp == Some(Amp::Bf16)),
            key if key.starts_with("fp16.") => Value::Null, // DeepSpeed's default
            "optimizer.params.lr" => json!(self.lr),
            "optimizer.params.betas" => json!([adamw.beta_1, adamw.beta_2]),
            "optimizer.params.eps" => json!(adamw.epsilon),
            "optimizer.params.weight_decay" => json!(adamw.weight_decay),
            // A bucket is as large as a square weight, as in Transformers.
            "zero_optimization.reduce_bucket_size" => json!(self.width * self.width),
            _ => return None,
        })
    }

    /// Reads the file, or with no path an empty one. `schedule` is what to do in place of its
    /// section.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`]; [`TrainingError::Options`] with the file, the key and what is wrong.
    pub fn read(
        &self,
        path: Option<&Path>,
        schedule: &str,
    ) -> Result<DeepSpeedConfig, TrainingError> {
        let text = match path {
            Some(path) => fs_err::read_to_string(path)?,
            None => "{}".to_owned(),
        };
        let file: Value = serde_json::from_str(&text).unwrap_or_default();
        let read = if file["scheduler"].is_null() {
            DeepSpeedConfig::from_json_with(&text, &|key| self.value(key))
        } else {
            let fault = ConfigFault::Key {
                path: "scheduler".to_owned(),
                reason: schedule.to_owned(),
            };
            Err(fault.into())
        };
        read.map_err(|error| refused(path, &error))
    }
}

/// A key of the file, or of the command line, that cannot be.
pub fn refused(path: Option<&Path>, error: &ZeroError) -> TrainingError {
    let place = path.map_or("the command line".into(), Path::to_string_lossy);
    TrainingError::Options(format!("{place}: {error}"))
}
