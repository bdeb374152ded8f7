//! The settings of a run: the command line, and the file in DeepSpeed's format that it may name.

use std::fmt;
use std::path::Path;

use burn::lr_scheduler::composed::{ComposedLrScheduler, ComposedLrSchedulerConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::{GradScaler, GradScalerConfig};
use burn_zero::{
    BatchConfig, BatchSizes, ConfigError, HostAdamWConfig, Memory, RankReduction, ZeroConfig,
    offload_parameters,
};
use serde_json::{Value, json};

use super::deepspeed::DeepSpeed;
use super::model::Gpt;
use super::options::Options;
use crate::training::error::TrainingError;
use crate::training::precision::Amp;
use crate::training::update::UpdateParts;

/// Sequences in a micro-batch by default.
const BATCH: u64 = 16;

/// Highest learning rate by default.
const LEARNING_RATE: f64 = 2e-3;

/// All settings of a run over a known number of ranks, beside those of the model and the data. Its
/// display is what training prints at the start.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Precision of the forward and backward pass.
    pub amp: Amp,
    /// How losses are scaled, which only f16 needs.
    pub scaler: GradScalerConfig,
    /// The optimizer, wherever its state is.
    pub adamw: HostAdamWConfig,
    /// Highest learning rate.
    pub lr: f64,
    /// Stage, clipping, offload, communication.
    pub zero: ZeroConfig,
    /// All batch sizes.
    pub batch: BatchSizes,
}

impl Job {
    /// Puts the command line and its file together, for so many ranks. What the command line says
    /// counts, then the file, then the defaults.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`], [`TrainingError::Options`].
    pub fn new(options: &Options, ranks: usize) -> Result<Self, TrainingError> {
        let path = options.config.as_deref();
        let place = path.map_or("the command line".into(), Path::to_string_lossy);
        let refused = |error: ConfigError| TrainingError::Options(format!("{place}: {error}"));
        let file = match path {
            Some(path) => fs_err::read_to_string(path)?,
            None => "{}".into(),
        };
        let file = DeepSpeed::read(&file, &|key| auto(options, key)).map_err(refused)?;
        let (of_file, scaler) = file.precision.unzip();
        let amp = options.memory.amp.or(of_file).unwrap_or(Amp::Off);
        let scaler = scaler.filter(|_| Some(amp) == of_file);
        let (of_file, adamw) = file.adamw.unzip();
        let lr = options.lr.or(of_file).unwrap_or(LEARNING_RATE);
        let mut zero = file.zero;
        options.memory.set(&mut zero);
        zero.batch = batches(options, zero.batch, ranks)?;
        let batch = zero.batch.resolve(ranks).map_err(refused)?;
        zero.batch.gradient_accumulation_steps = Some(batch.steps);
        Ok(Self {
            amp,
            scaler: scaler.unwrap_or_else(|| amp.configs().1),
            adamw: adamw.unwrap_or_else(default_adamw),
            lr,
            zero,
            batch,
        })
    }

    /// The model of the options, its parameters where this job has them. In host memory they are
    /// drawn one at a time.
    pub fn model<B: AutodiffBackend>(&self, options: &Options, device: &B::Device) -> Gpt<B> {
        let model = options.model();
        match self.zero.offload_param {
            Memory::Device => model.init(device),
            Memory::Host => offload_parameters::<B, _>(model.undrawn(device))
                .expect("the backend that trains has a `Remat`"),
        }
    }

    /// The learning rate of each update: a linear warm-up, times a cosine down to a tenth.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Options`] if Burn refuses the numbers.
    pub fn schedule(&self, options: &Options) -> Result<ComposedLrScheduler, TrainingError> {
        let cosine = CosineAnnealingLrSchedulerConfig::new(self.lr, options.steps);
        let schedule = ComposedLrSchedulerConfig::new().cosine(cosine.with_min_lr(self.lr / 10.0));
        let schedule = match options.warmup() {
            0 => schedule,
            warmup => {
                let first = 1.0 / (warmup as f64 + 1.0);
                schedule.linear(LinearLrSchedulerConfig::new(first, 1.0, warmup))
            }
        };
        let refused =
            |reason| TrainingError::Options(format!("learning rate {}: {reason}", self.lr));
        schedule.init().map_err(refused)
    }

    /// The update, over the ranks of `reduction`, with this scaler, which is that of the job.
    pub fn update<'a>(
        &'a self,
        reduction: &'a RankReduction,
        scaler: &'a GradScaler,
    ) -> UpdateParts<'a> {
        UpdateParts {
            adamw: &self.adamw,
            zero: &self.zero,
            reduction,
            window: AccumConfig::mean(self.batch.steps as usize),
            scaler,
        }
    }

    /// Sets the window that was found for `--effective-batch`.
    pub fn set_window(&mut self, micro_batch: usize, steps: usize) {
        (self.batch.micro, self.batch.steps) = (micro_batch as u64, steps as u64);
        self.zero.batch.gradient_accumulation_steps = Some(self.batch.steps);
    }
}

/// The batch sizes that are given. Until the micro-batch for an `--effective-batch` is found, it is
/// the whole of it.
fn batches(
    options: &Options,
    file: BatchConfig,
    ranks: usize,
) -> Result<BatchConfig, TrainingError> {
    let size = |size: Option<usize>| size.map(|size| size as u64);
    match (options.effective_batch, ranks) {
        (None, _) => {
            let micro = size(options.batch).or(file.train_micro_batch_size_per_gpu);
            let default = file.train_batch_size.is_none().then_some(BATCH);
            Ok(BatchConfig {
                train_micro_batch_size_per_gpu: micro.or(default),
                gradient_accumulation_steps: size(options.accum)
                    .or(file.gradient_accumulation_steps),
                ..file
            })
        }
        (effective_batch, 1) => Ok(BatchConfig {
            train_batch_size: size(effective_batch),
            ..BatchConfig::default()
        }),
        (Some(effective_batch), ranks) => Err(TrainingError::Options(format!(
            "--effective-batch {effective_batch} is looked for on one rank, but there are {ranks}: give --batch and --accum"
        ))),
    }
}

/// AdamW with the moments of GPT-3 (Brown et al. 2020).
fn default_adamw() -> HostAdamWConfig {
    HostAdamWConfig {
        beta_2: 0.95,
        ..HostAdamWConfig::default()
    }
}

/// The values for the file's `"auto"`: from the options, their defaults where they are not given,
/// and the model.
fn auto(options: &Options, key: &str) -> Option<Value> {
    let adamw = default_adamw();
    Some(match key {
        "fp16.enabled" => json!(options.memory.amp == Some(Amp::F16)),
        "bf16.enabled" | "bfloat16.enabled" => json!(options.memory.amp == Some(Amp::Bf16)),
        key if key.starts_with("fp16.") => Value::Null, // DeepSpeed's default
        "optimizer.params.lr" => json!(options.lr.unwrap_or(LEARNING_RATE)),
        "optimizer.params.betas" => json!([adamw.beta_1, adamw.beta_2]),
        "optimizer.params.eps" => json!(adamw.epsilon),
        "optimizer.params.weight_decay" => json!(adamw.weight_decay),
        // A bucket is as large as a square weight, as in Transformers.
        "zero_optimization.reduce_bucket_size" => json!(options.width * options.width),
        _ => return None,
    })
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let batch = &self.batch;
        let ranks = match batch.world_size {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        let scaler = match self.amp {
            Amp::F16 => format!(", losses times {} at first", self.scaler.init_scale),
            Amp::Off | Amp::Bf16 => String::new(),
        };
        let norm = self.zero.gradient_clipping;
        let norm = norm.map_or("none".into(), |norm| format!("to a global norm of {norm}"));
        let place = |memory| match memory {
            Memory::Device => "on the device",
            Memory::Host => "in host memory",
        };
        let (parameters, state) = (self.zero.offload_param, self.zero.offload_optimizer);
        writeln!(f, "{} over {ranks}", self.zero.stage)?;
        let (train, micro, steps) = (batch.train, batch.micro, batch.steps);
        let batch = format!("{train} = {micro} a micro-batch x {steps} accumulated x {ranks}");
        writeln!(f, "  batch              {batch}")?;
        writeln!(f, "  precision          {}{scaler}", self.amp.dtype())?;
        writeln!(f, "  gradient clipping  {norm}")?;
        writeln!(f, "  parameters         {}", place(parameters))?;
        writeln!(f, "  AdamW's state      {}", place(state))?;
        let mut ignored = self.zero.ignored.iter();
        ignored.try_for_each(|(key, reason)| writeln!(f, "  ignored            {key}: {reason}"))
    }
}
