//! The command line.

use std::path::PathBuf;

use burn_zero::{BatchConfig, DeepSpeedConfig, ZeroConfig};
use clap::{ArgGroup, Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use super::tuning::TuningOptions;
use crate::llm::LlmConfig;
use crate::training::error::TrainingError;
use crate::training::options::{
    MemoryOptions, above_zero, bytes, learning_rate, positive, probability,
};

/// Continues the training of a Llama, Mistral, Qwen2 or Qwen3 model on text, and writes it as a
/// Hugging Face directory.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(name = "finetune", version, args_override_self = true)]
#[command(group = ArgGroup::new("data").args(["text", "chat"]).required(true))]
pub struct Options {
    /// The model: a directory with config.json, tokenizer.json and *.safetensors
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,

    /// Text to train on, a document each
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Data")]
    pub text: Vec<PathBuf>,

    /// Conversations to train on, with the loss on the answers: JSON lines with messages (role,
    /// content), or with prompt and completion
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Data")]
    pub chat: Vec<PathBuf>,

    /// Text, or conversations, to validate on [default: the last twentieth of the sequences]
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Data")]
    pub valid: Vec<PathBuf>,

    /// Tokens of a sequence; longer conversations are cut
    #[arg(long, default_value_t = 256, value_parser = at_least_two, help_heading = "Data")]
    pub context: usize,

    /// What a sequence is: of several documents, or conversations, or of one [default: documents for
    /// --text, none for --chat]
    #[arg(long, value_enum, help_heading = "Data")]
    pub packing: Option<Packing>,

    /// Read the sequences as they are in the text, not in another order in each epoch
    #[arg(long, help_heading = "Data")]
    pub no_shuffle: bool,

    /// What is trained.
    #[command(flatten)]
    pub tuning: TuningOptions,

    /// Write the model with the adapters merged into it too, into merged/ of the output
    #[arg(long, help_heading = "What is trained")]
    pub merge: bool,

    /// Optimizer updates [default: as many as read the text once]
    #[arg(long, value_parser = positive(), help_heading = "Training")]
    pub steps: Option<usize>,

    /// Sequences in a batch of a rank, that is, a micro-batch: what is in memory at once
    #[arg(long, default_value_t = 2, value_parser = positive(), help_heading = "Training")]
    pub batch: usize,

    /// Batches of a rank in an update (gradient accumulation)
    #[arg(long, default_value_t = 1, value_parser = positive(), help_heading = "Training")]
    pub accum: usize,

    /// Highest learning rate
    #[arg(long, default_value_t = 2e-5, value_parser = learning_rate, help_heading = "Training")]
    pub lr: f64,

    /// How the learning rate goes on: stays, or falls to 0 along half a cosine
    #[arg(long, value_enum, default_value_t = Schedule::Cosine, help_heading = "Training")]
    pub schedule: Schedule,

    /// AdamW's decay of the mean of gradients
    #[arg(long, default_value_t = 0.9, value_parser = probability, help_heading = "Training")]
    pub beta_1: f64,

    /// AdamW's decay of the mean of squared gradients
    #[arg(long, default_value_t = 0.999, value_parser = probability, help_heading = "Training")]
    pub beta_2: f64,

    /// AdamW's term beside the root of the mean of squared gradients
    #[arg(long, default_value_t = 1e-8, value_parser = above_zero, help_heading = "Training")]
    pub epsilon: f64,

    /// AdamW's weight decay, of all parameters
    #[arg(long, default_value_t = 0.01, value_parser = probability, help_heading = "Training")]
    pub weight_decay: f64,

    /// The norm over all gradients that they are scaled down to
    #[arg(long, value_name = "NORM", default_value_t = 1.0, value_parser = above_zero)]
    #[arg(help_heading = "Training")]
    pub clip: f64,

    /// Seed of the order and of dropout
    #[arg(long, default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// What changes the memory and the time of a step.
    #[command(flatten)]
    pub memory: MemoryOptions,

    /// Memory of the device that the training may take, in MiB or GiB: 900M, 8G. It chooses the other
    /// options of memory, and micro-batches, by the time of an update; those that are given stay
    #[arg(long = "memory", value_name = "BYTES", value_parser = bytes)]
    #[arg(help_heading = "Memory and speed")]
    pub memory_bytes: Option<u64>,

    /// A DeepSpeed file: batch sizes, precision, ZeRO, offload, clipping, AdamW. What the command
    /// line says counts before it
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// What is in it.
    #[arg(skip)]
    pub file: Option<DeepSpeedConfig>,

    /// Directory of the trained model, or its adapters, of records, and of report.json
    #[arg(long, default_value = "artifacts/finetune")]
    pub output: PathBuf,

    /// Updates between two records, of the whole model and of the optimizer, from which --resume goes
    /// on: the last two are kept [default: none are written]
    #[arg(long, value_name = "UPDATES", value_parser = positive())]
    pub save_every: Option<usize>,

    /// Go on from the last record in --output, with the same settings
    #[arg(long)]
    pub resume: bool,
}

/// What `--packing` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Packing {
    /// Attention stays within a document, and positions begin again in each
    Documents,
    /// One text: attention crosses the boundaries of documents
    Plain,
    /// A sequence is a conversation, and batches have conversations of similar lengths
    None,
}

/// What `--schedule` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Schedule {
    /// The learning rate stays
    Constant,
    /// It falls to 0 along half a cosine
    Cosine,
}

impl Schedule {
    /// The learning rate of an update, counted from 0, of `steps`: PyTorch's `CosineAnnealingLR`.
    pub fn lr(self, highest: f64, update: usize, steps: usize) -> f64 {
        match self {
            Self::Constant => highest,
            Self::Cosine => {
                let turned = std::f64::consts::PI * update as f64 / steps as f64;
                highest * (1.0 + turned.cos()) / 2.0
            }
        }
    }
}

impl Options {
    /// What a sequence is.
    pub fn packing(&self) -> Packing {
        let default = if self.chat.is_empty() {
            Packing::Documents
        } else {
            Packing::None
        };
        self.packing.unwrap_or(default)
    }

    /// The update.
    pub fn config(&self) -> DeepSpeedConfig {
        let batch = BatchConfig {
            train_batch_size: None,
            train_micro_batch_size_per_gpu: Some(self.batch as u64),
            gradient_accumulation_steps: Some(self.accum as u64),
        };
        let file = self.file.as_ref();
        let mut zero = ZeroConfig {
            batch,
            gradient_clipping: Some(self.clip),
            ..file.map_or_else(ZeroConfig::default, |file| file.zero.clone())
        };
        self.memory.set(&mut zero);
        let amp = self.memory.amp();
        let precision = match file {
            Some(file) => amp.precision_beside(&file.precision),
            None => amp.precision(),
        };
        DeepSpeedConfig {
            zero,
            precision,
            adamw: Some(self.adamw()),
            learning_rate: Some(self.lr),
        }
    }
}

/// The loss is of every token after the first.
fn at_least_two(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(tokens) if tokens >= 2 => Ok(tokens),
        _ => Err("must be a number of at least 2".into()),
    }
}

/// # Errors
///
/// [`TrainingError::Options`] for a `--context` that the model was not made for, or that has no next
/// token.
pub fn check_context(context: usize, config: &LlmConfig) -> Result<(), TrainingError> {
    if (2..=config.context).contains(&context) {
        return Ok(());
    }
    Err(TrainingError::Options(format!(
        "--context {context}: give 2 to {} tokens, for which the model was made (max_position_embeddings)",
        config.context
    )))
}
