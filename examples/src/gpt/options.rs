//! The command line.

use std::path::PathBuf;

use clap::Parser;

use super::loader::Plan;
use super::model::{GptConfig, Loss};
use crate::training::error::TrainingError;
use crate::training::options::{MemoryOptions, learning_rate, mebibytes, positive, probability};

/// Trains a decoder-only transformer on the bytes of a text, then writes a table, a sample and a
/// report.
///
/// Without options it trains on this repository's own sources for two to five minutes on two cores.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(name = "gpt", version, args_override_self = true)]
pub struct Options {
    /// Optimizer updates in total
    #[arg(long, default_value_t = 1200, value_parser = positive(), help_heading = "Training")]
    pub steps: usize,

    /// Sequences in a batch of a rank, that is, a micro-batch: what is in memory at once [default:
    /// 16]
    #[arg(long, value_parser = positive(), help_heading = "Training")]
    pub batch: Option<usize>,

    /// Batches of a rank in an update (gradient accumulation) [default: 1]
    #[arg(long, value_parser = positive(), help_heading = "Training")]
    pub accum: Option<usize>,

    /// Sequences in an update, instead of --batch and --accum: in the largest batches that fit into
    /// the memory
    #[arg(long, value_name = "SEQUENCES", value_parser = positive(), help_heading = "Training")]
    #[arg(conflicts_with_all = ["batch", "accum"])]
    pub effective_batch: Option<usize>,

    /// Memory that --effective-batch may use [default: all of the device's]
    #[arg(long, value_name = "MIB", value_parser = mebibytes(), help_heading = "Training")]
    #[arg(requires = "effective_batch", conflicts_with_all = ["batch", "accum"])]
    pub memory_limit: Option<u64>,

    /// From what the loss is computed
    #[arg(long, value_enum, default_value_t = Loss::Full, help_heading = "Training")]
    pub loss: Loss,

    /// Highest learning rate [default: 0.002]
    #[arg(long, value_parser = learning_rate, help_heading = "Training")]
    pub lr: Option<f64>,

    /// Updates over which the learning rate rises to its highest; a cosine over all updates goes
    /// down to a tenth [default: a tenth of the steps, at most 1000]
    #[arg(long, value_name = "STEPS", help_heading = "Training")]
    pub warmup: Option<usize>,

    /// Updates between two validations; each is followed by a record that --resume can start from
    /// [default: a tenth of the steps]
    #[arg(long, value_name = "STEPS", value_parser = positive(), help_heading = "Training")]
    pub eval_every: Option<usize>,

    /// Seed of the weights, the batches and the dropout masks
    #[arg(long, default_value_t = 42, help_heading = "Training")]
    pub seed: u64,

    /// DeepSpeed's JSON: batch sizes, precision, ZeRO, offload, clipping, AdamW. Options that are
    /// given count before it, but for its train_batch_size
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub config: Option<PathBuf>,

    /// What changes the memory and the time of a step.
    #[command(flatten)]
    pub memory: MemoryOptions,

    /// Bytes that the model sees at once
    #[arg(long, default_value_t = 64, value_parser = positive(), help_heading = "Model")]
    pub context: usize,

    /// Transformer blocks
    #[arg(long, default_value_t = 3, value_parser = positive(), help_heading = "Model")]
    pub layers: usize,

    /// Attention heads of a block; they divide the width
    #[arg(long, default_value_t = 2, value_parser = positive(), help_heading = "Model")]
    pub heads: usize,

    /// Features of a token
    #[arg(long, default_value_t = 128, value_parser = positive(), help_heading = "Model")]
    pub width: usize,

    /// Probability that a feature is dropped in training
    #[arg(long, default_value_t = 0.0, value_parser = probability, help_heading = "Model")]
    pub dropout: f64,

    /// Files to train on, in this order [default: the sources of this repository, which are part of
    /// the program]
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = "Data")]
    pub text: Vec<PathBuf>,

    /// Go on from the last record in the output directory
    #[arg(long, help_heading = "Run")]
    pub resume: bool,

    /// Draw the memory over one step, with what is dropped and what comes back, into this SVG file;
    /// into a JSON file for Perfetto if it ends so
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    pub memory_plot: Option<PathBuf>,

    /// Directory of the run: records, metrics, log, report.json
    #[arg(long, default_value = "artifacts/gpt", help_heading = "Run")]
    pub output: PathBuf,
}

impl Options {
    /// Finds options that contradict each other, which clap cannot see.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Options`], with the values and what would be right.
    pub fn validate(&self) -> Result<(), TrainingError> {
        let Self { heads, width, .. } = *self;
        let refused = |reason| Err(TrainingError::Options(reason));
        if !width.is_multiple_of(heads) {
            return refused(format!(
                "--heads {heads} does not divide --width {width}; the nearest width that it divides is {}",
                width.next_multiple_of(heads)
            ));
        }
        if let Some(reason) = self.memory.checkpoint.refused_of(self.layers) {
            return refused(format!("--checkpoint {reason}"));
        }
        match self.warmup {
            Some(warmup) if warmup > self.steps => refused(format!(
                "--warmup {warmup} is longer than the training: --steps is {}",
                self.steps
            )),
            _ => Ok(()),
        }
    }

    /// The model that these options describe.
    pub fn model(&self) -> GptConfig {
        GptConfig::new(self.context, self.layers, self.heads, self.width)
            .with_dropout(self.dropout)
            .with_checkpoint(self.memory.checkpoint)
            .with_loss(self.loss)
    }

    /// How the steps fall into epochs.
    pub fn plan(&self) -> Plan {
        let tenth = self.steps.div_ceil(10);
        Plan {
            steps: self.steps,
            epoch: self.eval_every.unwrap_or(tenth).min(self.steps),
        }
    }

    /// Updates over which the learning rate rises.
    pub fn warmup(&self) -> usize {
        self.warmup.unwrap_or((self.steps / 10).min(1000))
    }
}
