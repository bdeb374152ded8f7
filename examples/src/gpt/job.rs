//! A job: burn-zero's configuration of it, and what the sections of DeepSpeed's file mean that burn-zero leaves to the program.

use std::fmt;

use burn_amp::GradScalerConfig;
use burn_zero::{BatchSizes, ConfigError, Memory, ZeroConfig};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::optimizer::{AdamParams, OptimizerConfig};
use super::options::Amp;
use super::scheduler::SchedulerConfig;

/// A job over a known number of ranks. Its display is what training prints at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// What the file and the command line say.
    pub config: JobConfig,
    /// All batch sizes.
    pub batch: BatchSizes,
}

/// What a file, or the command line, says of a job.
#[derive(Clone, Debug, PartialEq)]
pub struct JobConfig {
    /// Stage, batch sizes, clipping, offload.
    pub zero: ZeroConfig,
    /// The type in which operations compute.
    pub amp: Amp,
    /// How losses are scaled, which only f16 needs.
    pub scaler: GradScalerConfig,
    /// The optimizer, if it is named.
    pub optimizer: Option<OptimizerConfig>,
    /// The schedule of the learning rate, if it is named.
    pub scheduler: Option<SchedulerConfig>,
}

/// Values of the program for a file's `"auto"`.
#[derive(Clone, Debug)]
pub struct AutoValues {
    /// Which of `fp16.enabled` and `bf16.enabled`, if any.
    pub amp: Amp,
    /// The numbers of the optimizer, and the highest learning rate of a schedule where the file does not say the optimizer's.
    pub adam: AdamParams,
    /// Updates in which the learning rate rises.
    pub warmup_steps: u64,
    /// Updates of the training.
    pub total_steps: u64,
    /// Features of a token: a bucket is as large as a square weight, as in Transformers.
    pub hidden_size: u64,
}

impl AutoValues {
    fn fill(&self, path: &str) -> Option<Value> {
        Some(match path {
            "fp16.enabled" => json!(self.amp == Amp::F16),
            "bf16.enabled" | "bfloat16.enabled" => json!(self.amp == Amp::Bf16),
            "optimizer.params.lr" | "scheduler.params.warmup_max_lr" => json!(self.adam.lr),
            "optimizer.params.betas" => json!(self.adam.betas),
            "optimizer.params.eps" => json!(self.adam.eps),
            "optimizer.params.weight_decay" => json!(self.adam.weight_decay),
            "scheduler.params.warmup_num_steps" => json!(self.warmup_steps),
            "scheduler.params.total_num_steps" => json!(self.total_steps),
            "zero_optimization.reduce_bucket_size" => json!(self.hidden_size * self.hidden_size),
            _ => return None,
        })
    }
}

impl Default for JobConfig {
    fn default() -> Self {
        Self {
            zero: ZeroConfig::default(),
            amp: Amp::Off,
            scaler: GradScalerConfig::disabled(),
            optimizer: None,
            scheduler: None,
        }
    }
}

impl JobConfig {
    /// Reads a file in DeepSpeed's format.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroConfig::from_deepspeed_json_with`]; a number of the optimizer or the schedule that cannot work.
    pub fn read(text: &str, auto: &AutoValues) -> Result<Self, ConfigError> {
        let mut auto = auto.clone();
        // A schedule rises to the rate that the file says.
        let file: Value = serde_json::from_str(text).unwrap_or_default();
        let lr = file.pointer("/optimizer/params/lr").and_then(Value::as_f64);
        auto.adam.lr = lr.unwrap_or(auto.adam.lr);
        let zero = ZeroConfig::from_deepspeed_json_with(text, &|path| auto.fill(path))?;
        let sections = &zero.sections;
        let (amp, scaler) = precision(sections.get("fp16"), sections.get("bf16"))?;
        let optimizer = sections.get("optimizer").map(optimizer).transpose()?;
        let scheduler = sections.get("scheduler").map(scheduler).transpose()?;
        Ok(Self {
            amp,
            scaler,
            optimizer,
            scheduler,
            zero,
        })
    }
}

fn refused(path: &str, reason: impl ToString) -> ConfigError {
    ConfigError::Key {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

fn parse<T: DeserializeOwned>(path: &str, value: Value) -> Result<T, ConfigError> {
    serde_json::from_value(value).map_err(|error| refused(path, error))
}

/// DeepSpeed's `fp16`, with its defaults.
#[derive(Deserialize)]
#[serde(default)]
struct Fp16 {
    enabled: bool,
    /// 0 for a scale that moves.
    loss_scale: f32,
    initial_scale_power: i32,
    loss_scale_window: u32,
    hysteresis: u32,
    min_loss_scale: f32,
}

impl Default for Fp16 {
    fn default() -> Self {
        Self {
            enabled: false,
            loss_scale: 0.0,
            initial_scale_power: 16,
            loss_scale_window: 1000,
            hysteresis: 2,
            min_loss_scale: 1.0,
        }
    }
}

fn precision(
    fp16: Option<&Value>,
    bf16: Option<&Value>,
) -> Result<(Amp, GradScalerConfig), ConfigError> {
    let section = |found: Option<&Value>| found.cloned().unwrap_or_else(|| json!({}));
    let fp16: Fp16 = parse("fp16", section(fp16))?;
    let bf16 = section(bf16).get("enabled").cloned();
    let bf16 = parse("bf16.enabled", bf16.unwrap_or(false.into()))?;
    match (fp16.enabled, bf16) {
        (true, true) => Err(refused(
            "fp16.enabled",
            "bf16.enabled is there too, but operations compute in one of them",
        )),
        (false, true) => Ok((Amp::Bf16, GradScalerConfig::disabled())),
        (false, false) => Ok((Amp::Off, GradScalerConfig::disabled())),
        (true, false) if fp16.loss_scale != 0.0 => {
            Ok((Amp::F16, GradScalerConfig::fixed(fp16.loss_scale)))
        }
        (true, false) => {
            let scaler = GradScalerConfig {
                init_scale: 2f32.powi(fp16.initial_scale_power),
                growth_interval: fp16.loss_scale_window,
                hysteresis: fp16.hysteresis,
                min_scale: fp16.min_loss_scale,
                ..GradScalerConfig::default()
            };
            let checked = scaler.validate();
            checked.map_err(|error| refused("fp16", error))?;
            Ok((Amp::F16, scaler))
        }
    }
}

/// The `params` of a section with its `type` among them.
fn flat(section: &Value) -> Value {
    let mut params = section["params"].clone();
    params["type"] = section["type"].clone();
    params
}

/// In DeepSpeed `"Adam"` is AdamW unless `adam_w_mode` is false, and `"AdamW"` always is. With `torch_adam` the
/// optimizer is PyTorch's, with the default weight decay of its AdamW.
fn optimizer(section: &Value) -> Result<OptimizerConfig, ConfigError> {
    const PARAMS: &str = "optimizer.params";

    let mut params = flat(section);
    let flag = |key: &str, default: bool| match params.get(key) {
        None => Ok(default),
        Some(value) => parse(&format!("{PARAMS}.{key}"), value.clone()),
    };
    let (decoupled, is_torchs) = (flag("adam_w_mode", true)?, flag("torch_adam", false)?);
    if params["type"] == "adam" && decoupled {
        params["type"] = "adamw".into();
    }
    if params["type"] == "adamw" && is_torchs && params["weight_decay"].is_null() {
        params["weight_decay"] = 0.01.into();
    }
    let config = parse(PARAMS, params)?;
    let decay = match &config {
        OptimizerConfig::Adam(adam) | OptimizerConfig::AdamW(adam) => {
            require(PARAMS, "betas", adam.betas.0, 0.0..1.0)?;
            require(PARAMS, "betas", adam.betas.1, 0.0..1.0)?;
            require(PARAMS, "eps", adam.eps, NOT_NEGATIVE)?;
            adam.weight_decay
        }
        OptimizerConfig::Sgd(sgd) => {
            require(PARAMS, "momentum", sgd.momentum, NOT_NEGATIVE)?;
            require(PARAMS, "dampening", sgd.dampening, NOT_NEGATIVE)?;
            sgd.weight_decay
        }
        OptimizerConfig::Adagrad(adagrad) => {
            require(PARAMS, "eps", adagrad.eps, NOT_NEGATIVE)?;
            adagrad.weight_decay
        }
    };
    require(PARAMS, "weight_decay", decay, NOT_NEGATIVE)?;
    require(PARAMS, "lr", config.lr(), NOT_NEGATIVE)?;
    Ok(config)
}

fn scheduler(section: &Value) -> Result<SchedulerConfig, ConfigError> {
    const PARAMS: &str = "scheduler.params";

    let config: SchedulerConfig = parse(PARAMS, flat(section))?;
    let steps = config.warmup().steps as f64;
    require(PARAMS, "warmup_num_steps", steps, AT_LEAST_ONE)?;
    let (names, from, to, total) = match config {
        SchedulerConfig::WarmupLR { min_lr, max_lr, .. } => {
            (RATES, min_lr, max_lr.unwrap_or(0.0), 1)
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
    require(PARAMS, names[0], from, NOT_NEGATIVE)?;
    require(PARAMS, names[1], to, NOT_NEGATIVE)?;
    require(PARAMS, "total_num_steps", total as f64, AT_LEAST_ONE)?;
    Ok(config)
}

const RATES: [&str; 2] = ["warmup_min_lr", "warmup_max_lr"];
const RATIOS: [&str; 2] = ["warmup_min_ratio", "cos_min_ratio"];
const NOT_NEGATIVE: Range = 0.0..f64::INFINITY;
const AT_LEAST_ONE: Range = 1.0..f64::INFINITY;

type Range = core::ops::Range<f64>;

fn require(section: &str, key: &str, value: f64, range: Range) -> Result<(), ConfigError> {
    if range.contains(&value) {
        return Ok(());
    }
    let bounds = match range.end {
        f64::INFINITY => format!("at least {}", range.start),
        end => format!("at least {} and below {end}", range.start),
    };
    let path = format!("{section}.{key}");
    Err(refused(&path, format!("{value}, but it must be {bounds}")))
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { config, batch } = self;
        let BatchSizes {
            train,
            micro,
            steps,
            world_size,
        } = batch;
        let zero = &config.zero;
        let ranks = if *world_size == 1 { "rank" } else { "ranks" };
        writeln!(f, "{} over {world_size} {ranks}", zero.stage)?;
        let mut line = |name: &str, text: fmt::Arguments<'_>| writeln!(f, "  {name:<19}{text}");
        line(
            "batch",
            format_args!(
                "{train} = {micro} a micro-batch x {steps} accumulated x {world_size} {ranks}"
            ),
        )?;
        let scaler = &config.scaler;
        match config.amp {
            Amp::Off => line("precision", format_args!("f32"))?,
            Amp::Bf16 => line(
                "precision",
                format_args!("bf16 under autocast, f32 parameters"),
            )?,
            Amp::F16 if !scaler.dynamic => line(
                "precision",
                format_args!(
                    "f16 under autocast, f32 parameters, losses times {}",
                    scaler.init_scale
                ),
            )?,
            Amp::F16 => line(
                "precision",
                format_args!(
                    "f16 under autocast, f32 parameters, losses times {} at first, doubled after {} finite steps, halved at \
                     overflow {}, at least {}",
                    scaler.init_scale, scaler.growth_interval, scaler.hysteresis, scaler.min_scale
                ),
            )?,
        }
        match zero.gradient_clipping {
            Some(norm) => line(
                "gradient clipping",
                format_args!("to a global norm of {norm}"),
            )?,
            None => line("gradient clipping", format_args!("none"))?,
        }
        match zero.offload_optimizer {
            Memory::Device => line("optimizer state", format_args!("on the device"))?,
            Memory::Host => line("optimizer state", format_args!("in host memory"))?,
        }
        let settings = zero.settings();
        let when = match settings.stage.shards_gradients() {
            true => "during backward",
            false => "in the step",
        };
        let (dtype, bucket) = (settings.communication_dtype, settings.bucket_elements);
        line(
            "communication",
            format_args!("gradients {when}, in {dtype}; {bucket} elements a bucket"),
        )?;
        if let Some(optimizer) = &config.optimizer {
            line("optimizer", format_args!("{optimizer:?}"))?;
        }
        if let Some(scheduler) = &config.scheduler {
            line("learning rate", format_args!("{scheduler:?}"))?;
        }
        let ignored = &zero.ignored;
        ignored
            .iter()
            .try_for_each(|(path, reason)| line("ignored", format_args!("{path}: {reason}")))
    }
}
