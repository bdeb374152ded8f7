//! The settings of a run: the command line, and the file in DeepSpeed's format that it may name.

use std::fmt;

use burn::lr_scheduler::composed::{ComposedLrScheduler, ComposedLrSchedulerConfig};
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::linear::LinearLrSchedulerConfig;
use burn::tensor::backend::AutodiffBackend;
use burn_zero::{
    BatchConfig, BatchSizes, DeepSpeedConfig, DeepSpeedPrecision, HostAdamWConfig, Memory,
    offload_parameters,
};

use super::model::Gpt;
use super::options::Options;
use crate::training::deepspeed::{Auto, refused};
use crate::training::error::TrainingError;
use crate::training::precision::Amp;

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
    /// The update: precision, AdamW, clipping, ranks, offload.
    pub config: DeepSpeedConfig,
    /// Highest learning rate.
    pub lr: f64,
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
        let auto = Auto {
            amp: options.memory.amp,
            lr: options.lr.unwrap_or(LEARNING_RATE),
            adamw: default_adamw(),
            width: options.width,
        };
        let mut config = auto.read(path, SCHEDULE)?;
        let asked = options.memory.amp;
        let amp = asked.unwrap_or_else(|| Amp::of(&config.precision));
        config.precision = amp.precision_beside(&config.precision);
        config.adamw.get_or_insert_with(default_adamw);
        let zero = &mut config.zero;
        options.memory.set(zero);
        zero.batch = batches(options, zero.batch, ranks)?;
        let resolved = zero.batch.resolve(ranks);
        let batch = resolved.map_err(|error| refused(path, &error))?;
        zero.batch.gradient_accumulation_steps = Some(batch.steps);
        let lr = options.lr.or(config.learning_rate);
        Ok(Self {
            amp,
            config,
            lr: lr.unwrap_or(LEARNING_RATE),
            batch,
        })
    }

    /// The model of the options, its parameters where this job has them. In host memory they are
    /// drawn one at a time.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Units`].
    pub fn model<B: AutodiffBackend>(
        &self,
        options: &Options,
        device: &B::Device,
    ) -> Result<Gpt<B>, TrainingError> {
        let model = options.model();
        let model = match self.config.zero.offload_param {
            Memory::Device => model.init(device),
            Memory::Host => offload_parameters::<B, _>(model.undrawn(device))
                .expect("the backend that trains has a `Remat`"),
        };
        let (model, _) = options.memory.checkpoint.with_units::<B, _>(model)?;
        Ok(model)
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

    /// Sets the window that was found for `--effective-batch`.
    pub fn set_window(&mut self, micro_batch: usize, steps: usize) {
        (self.batch.micro, self.batch.steps) = (micro_batch as u64, steps as u64);
        self.config.zero.batch.gradient_accumulation_steps = Some(self.batch.steps);
    }
}

const SCHEDULE: &str = "this program warms the learning rate up and lets it fall along a cosine: leave the section out, and see --warmup";

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

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let batch = &self.batch;
        let ranks = match batch.world_size {
            1 => "1 rank".to_owned(),
            ranks => format!("{ranks} ranks"),
        };
        let zero = &self.config.zero;
        let scaler = match &self.config.precision {
            DeepSpeedPrecision::F16(scaler) => {
                format!(", losses times {} at first", scaler.init_scale)
            }
            DeepSpeedPrecision::F32 | DeepSpeedPrecision::Bf16 => String::new(),
        };
        let norm = zero.gradient_clipping;
        let norm = norm.map_or("none".into(), |norm| format!("to a global norm of {norm}"));
        let place = |memory| match memory {
            Memory::Device => "on the device",
            Memory::Host => "in host memory",
        };
        let (parameters, state) = (zero.offload_param, zero.offload_optimizer);
        writeln!(f, "{} over {ranks}", zero.stage)?;
        let (train, micro, steps) = (batch.train, batch.micro, batch.steps);
        let batch = format!("{train} = {micro} a micro-batch x {steps} accumulated x {ranks}");
        writeln!(f, "  batch              {batch}")?;
        writeln!(f, "  precision          {}{scaler}", self.amp.dtype())?;
        writeln!(f, "  gradient clipping  {norm}")?;
        writeln!(f, "  parameters         {}", place(parameters))?;
        writeln!(f, "  AdamW's state      {}", place(state))?;
        let mut ignored = zero.ignored.iter();
        ignored.try_for_each(|(key, reason)| writeln!(f, "  ignored            {key}: {reason}"))
    }
}
