//! The model.

use std::path::Path;

use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, RmsNorm, RmsNormConfig};
use burn::prelude::*;
use burn_fused::LinearCrossEntropyLossConfig;

use super::attention::linear;
use super::{DecoderBlock, LlmConfig, LlmError, Rotation, weights};

/// A decoder with its head. Its parameters have the paths of the files' tensors, but for a norm's
/// `gamma`, which is `weight` there.
#[derive(Module, Debug)]
pub struct Llm<B: Backend> {
    model: Decoder<B>,
    /// `None` where its weight is that of the embedding.
    lm_head: Option<Linear<B>>,
    #[module(skip)]
    config: LlmConfig,
}

/// Embedding, [blocks](DecoderBlock), and a final norm.
#[derive(Module, Debug)]
pub struct Decoder<B: Backend> {
    embed_tokens: Embedding<B>,
    layers: Vec<DecoderBlock<B>>,
    norm: RmsNorm<B>,
}

impl LlmConfig {
    /// A model whose parameters have no values yet: [`read_weights`](Llm::read_weights) says where
    /// they come from.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Llm<B> {
        let embedding =
            EmbeddingConfig::new(self.vocabulary, self.width).with_initializer(Initializer::Zeros);
        let head = (!self.is_tied).then(|| linear(self.width, self.vocabulary, false, device));
        Llm {
            model: Decoder {
                embed_tokens: embedding.init(device),
                layers: (0..self.layers)
                    .map(|_| DecoderBlock::new(self, device))
                    .collect(),
                norm: RmsNormConfig::new(self.width)
                    .with_epsilon(self.norm_epsilon)
                    .init(device),
            },
            lm_head: head,
            config: self.clone(),
        }
    }
}

impl<B: Backend> Llm<B> {
    /// The model with the weights of a Hugging Face directory, each of which is read when it is
    /// first used, in the type of the backend's floats: so burn-zero's `offload_parameters`, and
    /// `prepare` at stage 3, have one of them at a time.
    ///
    /// # Errors
    ///
    /// A file that cannot be read, or is no safetensors file; a tensor that the model lacks, or has
    /// in another shape.
    ///
    /// # Panics
    ///
    /// The first use of a parameter panics if its file cannot be read any more.
    pub fn read_weights(self, folder: &Path) -> Result<Self, LlmError> {
        weights::read_on_use(self, folder)
    }

    /// What the model is made of.
    pub fn config(&self) -> &LlmConfig {
        &self.config
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, width]`
    pub fn hidden(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [_, time] = tokens.dims();
        let rotation = Rotation::new(&self.config, time, &tokens.device());
        let embedded = self.model.embed_tokens.forward(tokens);
        let blocks = self.model.layers.iter();
        let x = blocks.fold(embedded, |x, block| block.forward(x, &rotation));
        self.model.norm.forward(x)
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, vocabulary]`
    pub fn logits(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.hidden(tokens).matmul(self.head_weight().unsqueeze())
    }

    /// The mean cross entropy of every token after the first, in nats a token. The logits never
    /// exist whole.
    ///
    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[1]`
    pub fn loss(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 1> {
        let [_, time] = tokens.dims();
        let targets = tokens.clone().slice_dim(1, 1..time).flatten::<1>(0, 1);
        let hidden = self.hidden(tokens.slice_dim(1, 0..time - 1));
        let loss = LinearCrossEntropyLossConfig::new().init();
        loss.forward(hidden.flatten::<2>(0, 1), self.head_weight(), None, targets)
    }

    /// `[width, vocabulary]`
    fn head_weight(&self) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.model.embed_tokens.weight.val().transpose(),
        }
    }
}
