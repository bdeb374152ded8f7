//! The configuration of a job.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{
    AutoValues, BatchConfig, BatchSizes, ConfigError, LossScaling, OptimizerConfig,
    OptimizerOffload, Precision, SchedulerConfig, Stage3Config, deepspeed,
};
use crate::group::BufferDtype;
use crate::{Memory, Stage, ZeroSettings};

/// How a job trains over its ranks. Written by hand, read from DeepSpeed's JSON
/// ([`from_deepspeed_json`](Self::from_deepspeed_json)), or from its own (serde), which refuses unknown names too.
///
/// Defaults are those of DeepSpeed 0.19.8 except for the bucket sizes: its 5e8 would put all gradients of most models into one
/// bucket, which could only be reduced after backward.
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
/// assert_eq!(config.gradient_clipping, Some(1.0)); // DeepSpeed's default since June 2026
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
    /// The type in which operations compute. Default f32.
    pub precision: Precision,
    /// Gradients are scaled down to this norm over all parameters and ranks. Default 1; `None` (0 in DeepSpeed's file) for no
    /// clipping.
    pub gradient_clipping: Option<f64>,
    /// Where optimizer state lives. Default the device.
    pub offload_optimizer: OptimizerOffload,
    /// Elements of gradients that are reduced at a time, at most. Default 8,388,608.
    pub reduce_bucket_size: u64,
    /// Elements of parameters that are gathered at a time, at most. Default 8,388,608. Both fill the same buckets: the smaller
    /// of the two sizes counts.
    pub allgather_bucket_size: u64,
    /// The type in which gradients are sent. Default f32, their own type.
    pub communication_dtype: BufferDtype,
    /// The file's settings of stage 3, which is refused for now.
    pub stage_3: Stage3Config,
    /// The optimizer, if the configuration names it.
    pub optimizer: Option<OptimizerConfig>,
    /// The learning-rate schedule, if the configuration names it.
    pub scheduler: Option<SchedulerConfig>,
    /// Keys of the file that have no effect here.
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

/// A [`ZeroConfig`] for a known number of ranks: all values checked, all batch sizes known. Its display is the report that
/// training prints at the start.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ResolvedConfig {
    /// The configuration.
    pub config: ZeroConfig,
    /// All batch sizes.
    pub batch: BatchSizes,
}

impl Default for ZeroConfig {
    fn default() -> Self {
        let settings = ZeroSettings::stage(Stage::DataParallel);
        let bucket_size = settings.bucket_elements as u64;
        Self {
            stage: settings.stage,
            batch: BatchConfig::default(),
            precision: Precision::F32,
            gradient_clipping: Some(1.0),
            offload_optimizer: OptimizerOffload::None,
            reduce_bucket_size: bucket_size,
            allgather_bucket_size: bucket_size,
            communication_dtype: settings.communication_dtype,
            stage_3: Stage3Config::default(),
            optimizer: None,
            scheduler: None,
            ignored: Vec::new(),
        }
    }
}

impl ZeroConfig {
    /// Reads DeepSpeed's JSON (`ds_config.json`) of ZeRO stage 0, 1 or 2: integers may be written as
    /// `5e8`, `null` is the default, and keys without effect here are listed in
    /// [`ignored`](Self::ignored) with the reason. `"auto"` is replaced by a default where there is one: see [`AutoValues`].
    ///
    /// # Errors
    ///
    /// Any [`ConfigError`] but those of a world size: no JSON, an unknown or doubled key, a wrong type or value, an `"auto"` that
    /// only the program can fill in, and what DeepSpeed has and this crate has not. Stage 3 comes later; NVMe is not supported.
    pub fn from_deepspeed_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_deepspeed_json_with(text, &AutoValues::default())
    }

    /// Reads DeepSpeed's JSON, with values for its `"auto"`: those of the program's options and of its model.
    ///
    /// ```
    /// use burn_zero::{AutoValues, ZeroConfig};
    ///
    /// let file = r#"{"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "gradient_clipping": "auto",
    ///     "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "train_micro_batch_size_per_gpu": "auto"}"#;
    /// let error = ZeroConfig::from_deepspeed_json(file).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "optimizer.params.lr: \"auto\", and nothing fills it in: set AutoValues::lr, or put a value there",
    /// );
    /// let auto = AutoValues { lr: Some(3e-4), hidden_size: Some(768), ..Default::default() };
    /// let config = ZeroConfig::from_deepspeed_json_with(file, &auto)?;
    /// assert_eq!(config.optimizer.unwrap().lr(), 3e-4);
    /// assert_eq!((config.reduce_bucket_size, config.gradient_clipping), (768 * 768, Some(1.0)));
    /// # Ok::<(), burn_zero::ConfigError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`from_deepspeed_json`](Self::from_deepspeed_json).
    pub fn from_deepspeed_json_with(text: &str, auto: &AutoValues) -> Result<Self, ConfigError> {
        let config = deepspeed::read(text, auto)?;
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

    /// The settings for a [`ZeroOptimizer`](crate::ZeroOptimizer). Gradients are averaged over ranks, as in DeepSpeed;
    /// parameters are cut at any element: see [`ZeroSettings::partition`] for optimizers that need the other partition.
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
            // Saturated: longer than any buffer.
            bucket_elements: usize::try_from(bucket_size).unwrap_or(usize::MAX),
            communication_dtype: self.communication_dtype,
            gradients: match self.offload_optimizer.ratio() {
                // Gradients whose state stays on the device would have to be uploaded again.
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
            check("", "gradient_clipping", norm, POSITIVE)?;
        }
        let zero = |key, value, limits| check("zero_optimization.", key, value, limits);
        zero(
            "offload_optimizer.ratio",
            self.offload_optimizer.ratio(),
            PART,
        )?;
        zero("reduce_bucket_size", self.reduce_bucket_size as f64, SOME)?;
        zero(
            "allgather_bucket_size",
            self.allgather_bucket_size as f64,
            SOME,
        )?;
        let fp16 = |key, value, limits| check("fp16.", key, value, limits);
        match self.precision {
            Precision::F32 | Precision::Bf16 => {}
            Precision::F16(LossScaling::Fixed { scale }) => {
                fp16("loss_scale", scale.into(), SCALE)?
            }
            Precision::F16(LossScaling::Dynamic {
                initial_scale,
                window,
                hysteresis,
                min_scale,
            }) => {
                let first = f64::from(initial_scale);
                let least = (
                    SCALE.0,
                    first.next_up(),
                    "above 0 and at most 2^initial_scale_power",
                );
                fp16("initial_scale_power", first, SCALE)?;
                fp16("min_loss_scale", min_scale.into(), least)?;
                fp16("loss_scale_window", window.into(), SOME)?;
                fp16("hysteresis", hysteresis.into(), SOME)?;
            }
        }
        let optimizer = |key, value, limits| check("optimizer.params.", key, value, limits);
        let decay = match &self.optimizer {
            None => 0.0,
            Some(OptimizerConfig::Adam(adam) | OptimizerConfig::AdamW(adam)) => {
                optimizer("betas", adam.betas.0, BELOW_ONE)?;
                optimizer("betas", adam.betas.1, BELOW_ONE)?;
                optimizer("eps", adam.eps, NOT_NEGATIVE)?;
                adam.weight_decay
            }
            Some(OptimizerConfig::Sgd(sgd)) => {
                optimizer("momentum", sgd.momentum, NOT_NEGATIVE)?;
                optimizer("dampening", sgd.dampening, NOT_NEGATIVE)?;
                sgd.weight_decay
            }
            Some(OptimizerConfig::Adagrad(adagrad)) => {
                optimizer("eps", adagrad.eps, NOT_NEGATIVE)?;
                adagrad.weight_decay
            }
        };
        optimizer("weight_decay", decay, NOT_NEGATIVE)?;
        let lr = self.optimizer.as_ref().map_or(0.0, OptimizerConfig::lr);
        optimizer("lr", lr, NOT_NEGATIVE)?;
        let Some(scheduler) = &self.scheduler else {
            return Ok(());
        };
        let schedule = |key, value, limits| check("scheduler.params.", key, value, limits);
        schedule("warmup_num_steps", scheduler.warmup().steps as f64, SOME)?;
        const RATES: [&str; 2] = ["warmup_min_lr", "warmup_max_lr"];
        const RATIOS: [&str; 2] = ["warmup_min_ratio", "cos_min_ratio"];
        let (names, from, to, total) = match *scheduler {
            SchedulerConfig::WarmupLR { min_lr, max_lr, .. } => {
                (RATES, min_lr, max_lr.unwrap_or(lr), 1)
            }
            SchedulerConfig::WarmupDecayLR {
                min_lr,
                max_lr,
                total_steps,
                ..
            } => (RATES, min_lr, max_lr, total_steps),
            SchedulerConfig::WarmupCosineLR {
                min_ratio,
                end_ratio,
                total_steps,
                ..
            } => (RATIOS, min_ratio, end_ratio, total_steps),
        };
        schedule(names[0], from, NOT_NEGATIVE)?;
        schedule(names[1], to, NOT_NEGATIVE)?;
        schedule("total_num_steps", total as f64, SOME)
    }
}

/// The least value, the exclusive upper bound, and the text for an error.
type Limits = (f64, f64, &'static str);

const POSITIVE: Limits = (f64::MIN_POSITIVE, f64::INFINITY, "finite and above 0");
const NOT_NEGATIVE: Limits = (0.0, f64::INFINITY, "finite and not negative");
const SOME: Limits = (1.0, f64::INFINITY, "at least 1");
const BELOW_ONE: Limits = (0.0, 1.0, "at least 0 and below 1");
const PART: Limits = (0.0, 1.0f64.next_up(), "from 0 to 1");
/// Scales are f32.
const SCALE: Limits = (
    f32::MIN_POSITIVE as f64,
    f64::INFINITY,
    "finite and above 0",
);

fn check(section: &str, key: &str, value: f64, limits: Limits) -> Result<(), ConfigError> {
    let (least, end, expected) = limits;
    match (least..end).contains(&value) {
        true => Ok(()),
        false => Err(ConfigError::invalid(
            &format!("{section}{key}"),
            value,
            expected,
        )),
    }
}

impl fmt::Display for ResolvedConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, batch } = self;
        let BatchSizes {
            train,
            micro,
            steps,
            world_size,
        } = batch;
        let ranks = if *world_size == 1 { "rank" } else { "ranks" };
        let when = if config.stage.shards_gradients() {
            "during backward"
        } else {
            "in the step"
        };
        let clipping = config.gradient_clipping.map_or("none".to_owned(), |norm| {
            format!("to a global norm of {norm}")
        });
        let ZeroSettings {
            communication_dtype: dtype,
            bucket_elements: bucket,
            ..
        } = config.settings();
        let sizes = format!("{micro} a micro-batch x {steps} accumulated x {world_size} {ranks}");
        let mut lines = vec![
            ("batch", format!("{train} = {sizes}")),
            ("precision", config.precision.to_string()),
            ("gradient clipping", clipping),
            ("optimizer state", config.offload_optimizer.to_string()),
            (
                "communication",
                format!("gradients {when}, in {dtype}; {bucket} elements a bucket"),
            ),
        ];
        let optimizer = config.optimizer.iter();
        lines.extend(optimizer.map(|it| ("optimizer", it.to_string())));
        let scheduler = config.scheduler.iter();
        lines.extend(scheduler.map(|it| ("learning rate", format!("{it:?}"))));
        let ignored = config.ignored.iter();
        lines.extend(ignored.map(|key| ("ignored", format!("{}: {}", key.path, key.reason))));
        writeln!(f, "{} over {world_size} {ranks}", config.stage)?;
        lines
            .iter()
            .try_for_each(|(name, text)| writeln!(f, "  {name:<19}{text}"))
    }
}
