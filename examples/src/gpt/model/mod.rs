//! The model: a decoder-only transformer over bytes, from burn-nn parts.
//!
//! Pre-norm, as in GPT-2: every branch reads a normalised copy of the residual stream and adds to
//! the stream itself, so the stream stays in full precision from the embeddings to the last norm
//! whatever a branch computes in.
//!
//! Nothing here depends on the backend, or on the decorators over it.

mod attention;
mod block;
mod init;
mod loss;

pub use attention::CausalSelfAttention;
pub use block::{Block, FeedForward};
pub use loss::Loss;

use burn::nn::{
    Dropout, DropoutConfig, Embedding, EmbeddingConfig, LayerNorm, LayerNormConfig, Linear,
    LinearConfig,
};
use burn::prelude::*;
use burn_backend::tensor::FloatTensor;
use burn_decorator::module::for_each_float;

use crate::training::recompute::Checkpoint;

/// What [`Gpt`] is made of.
#[derive(Config, Debug)]
pub struct GptConfig {
    /// Number of different tokens; 256 for bytes.
    #[config(default = 256)]
    pub vocabulary: usize,
    /// The longest sequence the model can read, in tokens.
    pub context: usize,
    /// Number of blocks.
    pub layers: usize,
    /// Attention heads of a block; divides the width.
    pub heads: usize,
    /// Features of a token in the residual stream.
    pub width: usize,
    /// Probability that a dropout layer zeroes a feature.
    #[config(default = 0.0)]
    pub dropout: f64,
    /// What is done with a block's activations until backward.
    #[config(default = "Checkpoint::None")]
    pub checkpoint: Checkpoint,
    /// How [`Gpt::loss`] is computed.
    #[config(default = "Loss::Full")]
    pub loss: Loss,
}

/// A decoder-only transformer: embeddings, [blocks](Block), a final norm and the head.
#[derive(Module, Debug)]
pub struct Gpt<B: Backend> {
    token: Embedding<B>,
    position: Embedding<B>,
    dropout: Dropout,
    blocks: Vec<Block<B>>,
    norm: LayerNorm<B>,
    head: Linear<B>,
    context: usize,
    #[module(skip)]
    checkpoint: Checkpoint,
    #[module(skip)]
    loss: Loss,
}

impl GptConfig {
    /// Creates the model with freshly drawn weights (GPT-2's distribution), every one of them drawn
    /// before this returns.
    ///
    /// The weights are a function of `B::seed` at the call.
    ///
    /// # Panics
    ///
    /// If `heads` does not divide `width`, or one of the sizes is zero.
    pub fn init<B: Backend>(&self, device: &B::Device) -> Gpt<B> {
        let model = self.undrawn(device);
        // Burn draws a parameter at its first use, and a clone made before that draws values of its
        // own.
        for_each_float(&model, |_, _, _: FloatTensor<B>| {});
        model
    }

    /// The model of [`init`](Self::init), each of whose weights is drawn when it is first used: for
    /// those that leave the device one by one.
    ///
    /// # Panics
    ///
    /// As [`init`](Self::init).
    pub fn undrawn<B: Backend>(&self, device: &B::Device) -> Gpt<B> {
        let embedding = |rows| {
            EmbeddingConfig::new(rows, self.width)
                .with_initializer(init::WEIGHT)
                .init(device)
        };
        Gpt {
            token: embedding(self.vocabulary),
            position: embedding(self.context),
            dropout: DropoutConfig::new(self.dropout).init(),
            blocks: (0..self.layers).map(|_| Block::new(self, device)).collect(),
            norm: LayerNormConfig::new(self.width).init(device),
            head: LinearConfig::new(self.width, self.vocabulary)
                .with_bias(false)
                .with_initializer(init::WEIGHT)
                .init(device),
            context: self.context,
            checkpoint: self.checkpoint,
            loss: self.loss,
        }
    }
}

impl<B: Backend> Gpt<B> {
    /// Logits of the token after each position.
    ///
    /// # Shapes
    ///
    /// - tokens: `[batch, time]`, with time at most the model's context
    /// - output: `[batch, time, vocabulary]`
    pub fn forward(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        self.head.forward(self.hidden(tokens))
    }

    /// What the head reads: `[batch, time, width]`.
    fn hidden(&self, tokens: Tensor<B, 2, Int>) -> Tensor<B, 3> {
        let [_, time] = tokens.dims();
        let positions = Tensor::arange(0..time as i64, &tokens.device()).unsqueeze::<2>();

        // Its scope keeps dropout's draw as bits, and the residual stream begins with it: a tensor
        // can only be moved to the host if a scope has recorded it from its beginning.
        let stream = self.checkpoint.scope("embedding", || {
            let stream = self.token.forward(tokens) + self.position.forward(positions);
            self.dropout.forward(stream)
        });
        let blocks = self.blocks.iter().enumerate();
        let stream = blocks.fold(stream, |stream, (number, block)| {
            let label = format!("block {number}");
            self.checkpoint.scope(&label, || block.forward(stream))
        });

        self.norm.forward(stream)
    }

    /// The longest sequence the model can read, in tokens.
    pub fn context(&self) -> usize {
        self.context
    }
}
