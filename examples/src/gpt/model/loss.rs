//! The loss, from all logits or from some rows of them at a time.

use burn::nn::loss::CrossEntropyLossConfig;
use burn::prelude::*;
use burn_fused::LinearCrossEntropyLossConfig;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::Gpt;
use crate::gpt::loader::TokenBatch;

/// How the cross entropy over the vocabulary is computed.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Loss {
    /// From all logits, by Burn's `CrossEntropyLoss`
    #[default]
    Full,
    /// In chunks of rows, by burn-fused's `LinearCrossEntropyLoss`: for large vocabularies
    Chunked,
}

impl<B: Backend> Gpt<B> {
    /// Mean cross entropy of the bytes that follow, in nats a byte: shape `[1]`.
    pub fn loss(&self, batch: TokenBatch<B>) -> Tensor<B, 1> {
        let targets = batch.targets.flatten::<1>(0, 1);
        match self.loss {
            Loss::Full => {
                let logits = self.forward(batch.inputs).flatten::<2>(0, 1);
                let loss = CrossEntropyLossConfig::new().init(&logits.device());
                loss.forward(logits, targets)
            }
            Loss::Chunked => {
                let hidden = self.hidden(batch.inputs).flatten::<2>(0, 1);
                let loss = LinearCrossEntropyLossConfig::new().init();
                loss.forward(hidden, self.head.weight.val(), None, targets)
            }
        }
    }
}
