//! What is trained: all parameters, some, or adapters; and what is written of it.

use std::path::Path;

use burn::prelude::*;
use burn::tensor::DType;

use super::options::{FrozenType, Options, Packing};
use crate::llm::{ALL_LINEAR, Llm, LoraConfig};
use crate::training::error::TrainingError;
use crate::training::precision::Amp;

/// The directory, in that of the output, of the model with its adapters merged into it.
pub const MERGED: &str = "merged";

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
        let has_adapters = self.lora_rank.is_some() || self.adapter.is_some();
        if self.merge && !has_adapters {
            return refused(
                "--merge merges adapters, and there are none: give --lora-rank or --adapter, or leave --merge out: the whole model is written",
            );
        }
        if self.frozen == FrozenType::F32 {
            return Ok(());
        }
        if !has_adapters && self.train.is_empty() {
            return refused(
                "--frozen bf16, but no parameter is frozen: give --lora-rank, --adapter or --train",
            );
        }
        if self.memory.amp() != Amp::Bf16 {
            return refused("--frozen bf16 multiplies in bf16: give --amp bf16, or --frozen f32");
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
