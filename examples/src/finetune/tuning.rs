//! What is trained: all parameters, some, or adapters; and what is written of it.

use std::path::{Path, PathBuf};

use burn::prelude::*;
use burn::tensor::DType;
use burn_estimate::{Meta, MetaDevice};
use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize};

use super::options::{Options, Packing};
use crate::llm::{ADAPTER_SETTINGS, ALL_LINEAR, Llm, LlmConfig, LoraConfig};
use crate::training::error::TrainingError;
use crate::training::options::{above_zero, positive, probability};
use crate::training::precision::Amp;

/// The directory, in that of the output, of the model with its adapters merged into it.
pub const MERGED: &str = "merged";

/// What is trained of a model.
#[derive(Args, Clone, Debug, PartialEq)]
#[command(next_help_heading = "What is trained")]
pub struct TuningOptions {
    /// Train only the parameters whose names in *.safetensors look like one of these: '*.layers.29.*',
    /// 'lm_head.*'
    #[arg(long, value_name = "NAME", num_args = 1..)]
    #[arg(conflicts_with_all = ["lora_rank", "adapter"])]
    pub train: Vec<String>,

    /// Train adapters of this rank, and no parameter of the model (LoRA)
    #[arg(long, value_name = "RANK", value_parser = positive())]
    pub lora_rank: Option<usize>,

    /// What adapters add is multiplied with this over their rank [default: twice the rank]
    #[arg(long, value_name = "ALPHA", value_parser = above_zero)]
    #[arg(requires = "lora_rank")]
    pub lora_alpha: Option<f64>,

    /// Divide --lora-alpha by the root of the rank instead (rsLoRA)
    #[arg(long, requires = "lora_rank")]
    pub rslora: bool,

    /// Probability that a feature that an adapter reads is dropped in training [default: 0]
    #[arg(long, value_name = "PROBABILITY", value_parser = probability)]
    #[arg(requires = "lora_rank")]
    pub lora_dropout: Option<f64>,

    /// Linear layers of the blocks that are adapted, by their paths or the ends of these: q_proj
    /// v_proj; or all-linear [default: all-linear]
    #[arg(long, value_name = "PATH", num_args = 1.., requires = "lora_rank")]
    pub lora_targets: Vec<String>,

    /// Train the adapters of this directory on, as PEFT or this program has written it
    #[arg(long, value_name = "DIR", conflicts_with = "lora_rank")]
    pub adapter: Option<PathBuf>,

    /// Type in which frozen matrices are in memory; bf16 needs --amp bf16
    #[arg(long, value_enum, default_value_t = FrozenType::F32)]
    pub frozen: FrozenType,
}

/// What `--frozen` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FrozenType {
    /// As trained parameters
    F32,
    /// Half of the memory; the type of most published weights
    Bf16,
}

impl TuningOptions {
    /// Whether other than all parameters are trained, or frozen ones have a type of their own.
    pub fn is_given(&self) -> bool {
        self.has_adapters() || !self.train.is_empty() || self.frozen != FrozenType::F32
    }

    fn has_adapters(&self) -> bool {
        self.lora_rank.is_some() || self.adapter.is_some()
    }

    /// Finds options that contradict each other, which clap cannot see.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Options`], with the values and what would be right.
    pub fn validate(&self, amp: Amp) -> Result<(), TrainingError> {
        if self.frozen == FrozenType::F32 {
            return Ok(());
        }
        if !self.has_adapters() && self.train.is_empty() {
            return Err(TrainingError::Options(
                "--frozen bf16, but no parameter is frozen: give --lora-rank, --adapter or --train"
                    .to_owned(),
            ));
        }
        if amp != Amp::Bf16 {
            return Err(TrainingError::Options(
                "--frozen bf16 multiplies in bf16: give --amp bf16, or --frozen f32".to_owned(),
            ));
        }
        Ok(())
    }

    /// The adapters that are new, if any are.
    fn lora(&self) -> Option<LoraConfig> {
        let rank = self.lora_rank?;
        Some(LoraConfig {
            rank,
            alpha: self.lora_alpha.unwrap_or(2.0 * rank as f64),
            dropout: self.lora_dropout.unwrap_or(0.0),
            is_rank_stabilized: self.rslora,
        })
    }

    /// The same choice of parameters without `--adapter`: new adapters of the layers, and with the
    /// settings, of those in its files. What is estimated many times with it reads them once.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Model`], as [`tuned`](Self::tuned).
    pub fn without_files(&self, config: &LlmConfig) -> Result<Self, TrainingError> {
        let Some(folder) = &self.adapter else {
            return Ok(self.clone());
        };
        let model = config.init::<Meta>(&MetaDevice::new(0));
        let model = model.with_adapter(folder)?;
        let lora = model.lora().expect("a model with adapters");
        Ok(Self {
            adapter: None,
            lora_rank: Some(lora.rank),
            lora_alpha: Some(lora.alpha),
            rslora: lora.is_rank_stabilized,
            lora_dropout: Some(lora.dropout),
            lora_targets: model.target_modules(),
            ..self.clone()
        })
    }

    /// The model with the parameters that are trained, adapters among them, and the others frozen.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Model`] for what matches nothing, and for adapters of another model.
    pub fn tuned<B: Backend>(&self, model: Llm<B>) -> Result<Llm<B>, TrainingError> {
        let model = if let Some(config) = self.lora() {
            let all = [ALL_LINEAR.to_owned()];
            let targets = if self.lora_targets.is_empty() {
                &all[..]
            } else {
                &self.lora_targets
            };
            model.with_lora(&config, targets)?
        } else if let Some(folder) = &self.adapter {
            model.with_adapter(folder)?
        } else if self.train.is_empty() {
            model
        } else {
            model.with_trained(&self.train)?
        };
        Ok(match self.frozen {
            FrozenType::F32 => model,
            FrozenType::Bf16 => model.with_frozen_in(DType::BF16),
        })
    }
}

impl Options {
    /// Finds options that contradict each other, which clap cannot see.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Options`], with the values and what would be right.
    pub fn validate(&self) -> Result<(), TrainingError> {
        let refused = |reason: &str| Err(TrainingError::Options(reason.to_owned()));
        if self.packing() == Packing::None && self.chat.is_empty() {
            return refused(
                "--packing none is for --chat: a file of --text fills many sequences; give documents or plain",
            );
        }
        if self.merge && !self.tuning.has_adapters() {
            return refused(
                "--merge merges adapters, and there are none: give --lora-rank or --adapter, or leave --merge out: the whole model is written",
            );
        }
        self.check_output()?;
        self.tuning.validate(self.memory.amp())
    }

    /// # Errors
    ///
    /// [`TrainingError::Options`] where the result would destroy the model that is read, or would
    /// be taken for the adapters of an earlier run.
    fn check_output(&self) -> Result<(), TrainingError> {
        let same = |folder: &Path| match (fs_err::canonicalize(folder), self.model.canonicalize()) {
            (Ok(folder), Ok(model)) => folder == model,
            _ => false,
        };
        for folder in [self.output.clone(), self.output.join(MERGED)] {
            if same(&folder) {
                return Err(TrainingError::Options(format!(
                    "--output {} would be written over --model {}: give another directory",
                    self.output.display(),
                    self.model.display()
                )));
            }
        }
        let adapters = self.output.join(ADAPTER_SETTINGS);
        if !self.tuning.has_adapters() && adapters.exists() {
            return Err(TrainingError::Options(format!(
                "{} is of an earlier run, and transformers would load it in place of the model that is written beside it: \
                 give another --output, or move it away",
                adapters.display()
            )));
        }
        Ok(())
    }

    /// Writes what was trained: the model, or its adapters and with `--merge` the model too. All
    /// ranks call it, and one writes.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Model`].
    pub fn write<B: Backend>(&self, model: &Llm<B>, is_writer: bool) -> Result<(), TrainingError> {
        let to = |folder: &Path| is_writer.then(|| folder.to_owned());
        if model.lora().is_none() {
            model.write(&self.model, to(&self.output).as_deref())?;
            return Ok(());
        }
        model.write_adapter(&self.model, to(&self.output).as_deref())?;
        if self.merge {
            let merged = self.output.join(MERGED);
            model.write(&self.model, to(&merged).as_deref())?;
        }
        Ok(())
    }
}
