//! The model.

use std::path::Path;

use burn::nn::{Embedding, EmbeddingConfig, Initializer, Linear, RmsNorm, RmsNormConfig};
use burn::prelude::*;
use burn_fused::{LinearCrossEntropy, LinearCrossEntropyLossConfig};

use super::attention::linear;
use super::{DecoderBlock, Layout, LlmConfig, LlmError, Sequences, weights, write};
use crate::training::recompute::Checkpoint;

/// The target of a token whose successor is of another document.
const IGNORED: i64 = -100;

/// A decoder with its head. Its parameters have the paths of the files' tensors, but for a norm's
/// `gamma`, which is `weight` there.
#[derive(Module, Debug)]
pub struct Llm<B: Backend> {
    model: Decoder<B>,
    /// `None` where its weight is that of the embedding.
    lm_head: Option<Linear<B>>,
    #[module(skip)]
    config: LlmConfig,
    #[module(skip)]
    checkpoint: Checkpoint,
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
            checkpoint: Checkpoint::None,
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

    /// Writes a Hugging Face directory that `transformers` loads: the parameters in f32, each read
    /// when it is written, with the configuration and the tokenizer of the directory `from`, which
    /// the model was read from. Where ranks share the parameters all of them call this, and one has
    /// a directory to write to.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or written.
    pub fn write(&self, from: &Path, to: Option<&Path>) -> Result<(), LlmError> {
        write::write(self, from, to)
    }

    /// What the model is made of.
    pub fn config(&self) -> &LlmConfig {
        &self.config
    }

    /// What becomes of the activations of each block until backward.
    #[must_use]
    pub fn with_checkpoint(self, checkpoint: Checkpoint) -> Self {
        Self { checkpoint, ..self }
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, width]`
    fn hidden(&self, tokens: Tensor<B, 2, Int>, layout: &Layout<B>) -> Tensor<B, 3> {
        // In a scope, because a tensor can only be moved to the host if a scope has recorded it from
        // its beginning.
        let embed = || self.model.embed_tokens.forward(tokens);
        let embedded = self.checkpoint.scope("embedding", embed);
        let blocks = self.model.layers.iter().enumerate();
        let x = blocks.fold(embedded, |x, (number, block)| {
            let label = format!("layers.{number}");
            self.checkpoint.scope(&label, || block.forward(x, layout))
        });
        self.model.norm.forward(x)
    }

    /// # Shapes
    ///
    /// - tokens: `[batch, time]`
    /// - output: `[batch, time, vocabulary]`
    pub fn logits(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [_, time] = tokens.dims();
        let layout = Layout::new(&self.config, &[], time, &tokens.device());
        let hidden = self.hidden(tokens, &layout);
        hidden.matmul(self.head_weight().unsqueeze())
    }

    /// The mean cross entropy of every token after the first of its document, in nats a token, and
    /// the number of these tokens. The logits never exist whole.
    pub fn loss(&self, sequences: &Sequences<B>) -> LinearCrossEntropy<B> {
        let [_, time] = sequences.tokens.dims();
        let (device, read) = (sequences.tokens.device(), time - 1);
        let layout = Layout::new(&self.config, &sequences.boundaries, read, &device);
        let tokens = sequences.tokens.clone().slice_dim(1, 0..read);
        let hidden = self.hidden(tokens, &layout).flatten::<2>(0, 1);
        let loss = LinearCrossEntropyLossConfig::new().with_ignore_index(Some(IGNORED));
        let targets = sequences.targets(IGNORED);
        loss.init()
            .forward_counted(hidden, self.head_weight(), None, targets)
    }

    /// `[width, vocabulary]`
    fn head_weight(&self) -> Tensor<B, 2> {
        match &self.lm_head {
            Some(head) => head.weight.val(),
            None => self.model.embed_tokens.weight.val().transpose(),
        }
    }
}
