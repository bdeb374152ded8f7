//! The model's training step and validation step for the Learner.

use burn::prelude::*;
use burn::tensor::backend::AutodiffBackend;
use burn::train::metric::{Adaptor, LossInput};
use burn::train::{InferenceStep, ItemLazy, TrainOutput, TrainStep};
use burn_flex::Flex;
use burn_zero::RankItem;

use super::loader::TokenBatch;
use super::model::Gpt;

/// The output of a step for the metrics: only the loss, so that a step waits for one number and not
/// for all logits.
pub struct LossOutput<B: Backend> {
    loss: Tensor<B, 1>,
}

impl<B: AutodiffBackend> TrainStep for Gpt<B> {
    type Input = TokenBatch<B>;
    /// On the inner backend, so that the metrics do not keep the tape.
    type Output = LossOutput<B::InnerBackend>;

    fn step(&self, batch: TokenBatch<B>) -> TrainOutput<Self::Output> {
        let loss = self.loss(batch);
        let gradients = loss.backward();
        TrainOutput::new(self, gradients, LossOutput { loss: loss.inner() })
    }
}

impl<B: Backend> InferenceStep for Gpt<B> {
    type Input = TokenBatch<B>;
    type Output = LossOutput<B>;

    fn step(&self, batch: TokenBatch<B>) -> LossOutput<B> {
        LossOutput {
            loss: self.loss(batch),
        }
    }
}

impl<B: Backend> ItemLazy for LossOutput<B> {
    type ItemSync = LossOutput<Flex>;

    fn sync(self) -> LossOutput<Flex> {
        LossOutput {
            loss: Tensor::from_data(self.loss.into_data(), &Default::default()),
        }
    }
}

/// Sent from one process to another, because the metrics are those of all ranks.
impl<B: Backend> RankItem for LossOutput<B> {
    fn into_bytes(self) -> Vec<u8> {
        let loss: f32 = self.loss.into_scalar().elem();
        loss.to_le_bytes().into()
    }

    fn from_bytes(bytes: &[u8]) -> Result<Self, String> {
        let bytes = bytes.try_into().map_err(|_| "a loss has four bytes")?;
        let loss = Tensor::from_data([f32::from_le_bytes(bytes)], &Default::default());
        Ok(Self { loss })
    }
}

impl<B: Backend> Adaptor<LossInput<B>> for LossOutput<B> {
    fn adapt(&self) -> LossInput<B> {
        LossInput::new(self.loss.clone())
    }
}
