//! The configuration of a job.

use serde::{Deserialize, Serialize};

use super::{
    BatchConfig, ConfigError, LossScaling, OptimizerConfig, OptimizerOffload, Precision,
    ResolvedConfig, SchedulerConfig, deepspeed,
};
use crate::group::BufferDtype;
use crate::{Memory, Stage, ZeroSettings};

/// How a job trains over its ranks. Written by hand, read from DeepSpeed's JSON
/// ([`from_deepspeed_json`](Self::from_deepspeed_json)), or from its own (serde), which refuses unknown names too.
///
/// Defaults are DeepSpeed's but for the bucket sizes: its 5e8 would put all gradients of most models into one bucket, which can
/// only be reduced when backward is over.
///
/// ```
/// use burn_zero::{OptimizerOffload, Stage, ZeroConfig};
///
/// let config = ZeroConfig::from_deepspeed_json(
///     r#"{"train_batch_size": 64, "fp16": {"enabled": true}, "zero_optimization": {"stage": 2, "offload_optimizer":
///         {"device": "cpu", "pin_memory": true}, "offload_param": {"device": "cpu"}}}"#,
/// )?;
/// assert_eq!(config.stage, Stage::Gradients);
/// assert_eq!(config.offload_optimizer, OptimizerOffload::Host { ratio: 1.0 });
/// let ignored: Vec<_> = config.ignored.iter().map(|key| key.path.as_str()).collect();
/// assert_eq!(ignored, ["zero_optimization.offload_param", "zero_optimization.offload_optimizer.pin_memory"]);
///
/// let resolved = config.resolve(4)?;
/// assert_eq!((resolved.batch.micro, resolved.batch.steps), (16, 1));
/// println!("{resolved}");
///
/// let error = ZeroConfig::from_deepspeed_json(r#"{"zero_optimisation": {"stage": 2}}"#).unwrap_err();
/// assert_eq!(error.to_string(), "zero_optimisation: there is no such key; the nearest is `zero_optimization`");
/// # Ok::<(), burn_zero::ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ZeroConfig {
    /// What is sharded. Default nothing.
    pub stage: Stage,
    /// Batch sizes. Default none: one must be set before [`resolve`](Self::resolve).
    pub batch: BatchConfig,
    /// What operations compute in. Default f32.
    pub precision: Precision,
    /// Gradients are scaled down to this norm over all parameters and ranks. Default none (DeepSpeed's 0).
    pub gradient_clipping: Option<f64>,
    /// Where optimizer state lives. Default the device.
    pub offload_optimizer: OptimizerOffload,
    /// Elements of gradients that are reduced at a time, at most. Default 8,388,608.
    pub reduce_bucket_size: u64,
    /// Elements of parameters that are gathered at a time, at most. Default 8,388,608. Both fill the same buckets: the smaller
    /// of the two sizes counts.
    pub allgather_bucket_size: u64,
    /// What gradients are sent in. Default f32, which they are.
    pub communication_dtype: BufferDtype,
    /// The optimizer, if the configuration names it.
    pub optimizer: Option<OptimizerConfig>,
    /// The learning-rate schedule, if the configuration names it.
    pub scheduler: Option<SchedulerConfig>,
    /// What the file says and has no meaning here.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ignored: Vec<IgnoredKey>,
}

/// A key that DeepSpeed reads and that has no meaning here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct IgnoredKey {
    /// Where.
    pub path: String,
    /// Why it has no meaning.
    pub reason: String,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        let settings = ZeroSettings::stage(Stage::DataParallel);
        let bucket_size = settings.bucket_elements as u64;
        Self {
            stage: settings.stage,
            batch: BatchConfig::default(),
            precision: Precision::F32,
            gradient_clipping: None,
            offload_optimizer: OptimizerOffload::None,
            reduce_bucket_size: bucket_size,
            allgather_bucket_size: bucket_size,
            communication_dtype: settings.communication_dtype,
            optimizer: None,
            scheduler: None,
            ignored: Vec::new(),
        }
    }
}

impl ZeroConfig {
    /// Reads DeepSpeed's JSON (`ds_config.json`) of ZeRO stage 0, 1 or 2 as users have it: integers may be written as
    /// `5e8`, `null` is the default, and a key may stand there that has no meaning here: it is listed in
    /// [`ignored`](Self::ignored) with the reason.
    ///
    /// # Errors
    ///
    /// Any [`ConfigError`] but those of a world size: no JSON, an unknown or doubled key, a wrong type or value, `"auto"`,
    /// and what DeepSpeed has and this crate has not. Stage 3 comes later; NVMe is not supported.
    pub fn from_deepspeed_json(text: &str) -> Result<Self, ConfigError> {
        let config = deepspeed::read(text)?;
        config.validate()?;
        Ok(config)
    }

    /// Checks everything and finds the batch sizes for `world_size` ranks.
    ///
    /// # Errors
    ///
    /// As [`validate`](Self::validate) and [`BatchConfig::resolve`].
    pub fn resolve(&self, world_size: usize) -> Result<ResolvedConfig, ConfigError> {
        self.validate()?;
        let batch = self.batch.resolve(world_size)?;
        Ok(ResolvedConfig {
            config: self.clone(),
            batch,
        })
    }

    /// What it says to a [`ZeroOptimizer`](crate::ZeroOptimizer). Gradients become their mean over ranks, as in DeepSpeed;
    /// parameters are cut at any element: see [`ZeroSettings::partition`] for the optimizers that need another one.
    ///
    /// ```
    /// use burn_zero::{ZeroSettings, Stage, ZeroConfig};
    ///
    /// let config = ZeroConfig::from_deepspeed_json(
    ///     r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": 2e6, "allgather_bucket_size": 1e6}}"#,
    /// )?;
    /// let expected = ZeroSettings { bucket_elements: 1_000_000, ..ZeroSettings::stage(Stage::Gradients) };
    /// assert_eq!(config.settings(), expected);
    /// # Ok::<(), burn_zero::ConfigError>(())
    /// ```
    pub fn settings(&self) -> ZeroSettings {
        let bucket_size = self.reduce_bucket_size.min(self.allgather_bucket_size);
        ZeroSettings {
            // Longer than any buffer there is.
            bucket_elements: usize::try_from(bucket_size).unwrap_or(usize::MAX),
            communication_dtype: self.communication_dtype,
            gradients: match self.offload_optimizer.ratio() {
                // What stays on the device would come back to it.
                ratio if ratio < 1.0 => Memory::Device,
                _ => Memory::Host,
            },
            ..ZeroSettings::stage(self.stage)
        }
    }

    /// Checks every number.
    ///
    /// # Errors
    ///
    /// [`ConfigError::InvalidValue`] for the first that cannot work, under its name in DeepSpeed's JSON.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.batch.validate()?;
        if let Some(norm) = self.gradient_clipping {
            check(
                "gradient_clipping",
                norm,
                norm.is_finite() && norm > 0.0,
                "finite and above 0",
            )?;
        }
        let ratio = self.offload_optimizer.ratio();
        let within = (0.0..=1.0).contains(&ratio);
        check(
            "zero_optimization.offload_optimizer.ratio",
            ratio,
            within,
            "between 0 and 1",
        )?;
        for (name, size) in [
            (
                "zero_optimization.reduce_bucket_size",
                self.reduce_bucket_size,
            ),
            (
                "zero_optimization.allgather_bucket_size",
                self.allgather_bucket_size,
            ),
        ] {
            check(name, size as f64, size > 0, "at least 1")?;
        }
        self.validate_precision()?;
        self.validate_optimizer()
    }

    fn validate_precision(&self) -> Result<(), ConfigError> {
        let Precision::F16(scaling) = self.precision else {
            return Ok(());
        };
        let positive = |name, scale: f32| {
            check(
                name,
                scale.into(),
                scale.is_normal() && scale > 0.0,
                "finite and above 0",
            )
        };
        match scaling {
            LossScaling::Fixed { scale } => positive("fp16.loss_scale", scale),
            LossScaling::Dynamic {
                initial_scale,
                window,
                hysteresis,
                min_scale,
            } => {
                positive("fp16.initial_scale_power", initial_scale)?;
                positive("fp16.min_loss_scale", min_scale)?;
                check(
                    "fp16.min_loss_scale",
                    min_scale.into(),
                    min_scale <= initial_scale,
                    "at most 2^initial_scale_power",
                )?;
                check(
                    "fp16.loss_scale_window",
                    window.into(),
                    window > 0,
                    "at least 1",
                )?;
                check(
                    "fp16.hysteresis",
                    hysteresis.into(),
                    hysteresis > 0,
                    "at least 1",
                )
            }
        }
    }

    fn validate_optimizer(&self) -> Result<(), ConfigError> {
        let not_negative = |name, value: f64| {
            check(
                name,
                value,
                value.is_finite() && value >= 0.0,
                "finite and not negative",
            )
        };
        let decay = match &self.optimizer {
            None => return Ok(()),
            Some(OptimizerConfig::Adam(params) | OptimizerConfig::AdamW(params)) => {
                for beta in [params.betas.0, params.betas.1] {
                    check(
                        "optimizer.params.betas",
                        beta,
                        (0.0..1.0).contains(&beta),
                        "at least 0 and below 1",
                    )?;
                }
                not_negative("optimizer.params.eps", params.eps)?;
                params.weight_decay
            }
            Some(OptimizerConfig::Sgd(params)) => {
                not_negative("optimizer.params.momentum", params.momentum)?;
                not_negative("optimizer.params.dampening", params.dampening)?;
                params.weight_decay
            }
            Some(OptimizerConfig::Adagrad(params)) => {
                not_negative("optimizer.params.eps", params.eps)?;
                params.weight_decay
            }
        };
        not_negative("optimizer.params.weight_decay", decay)?;
        not_negative(
            "optimizer.params.lr",
            self.optimizer.as_ref().map_or(0.0, OptimizerConfig::lr),
        )
    }
}

fn check(path: &str, value: f64, holds: bool, expected: &'static str) -> Result<(), ConfigError> {
    if holds {
        return Ok(());
    }
    Err(ConfigError::InvalidValue {
        path: path.to_owned(),
        value: value.to_string(),
        expected,
    })
}
