//! A block of the transformer: attention between tokens, then an MLP on each.

use burn::nn::{Dropout, DropoutConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::prelude::*;

use super::{CausalSelfAttention, GptConfig, init};

/// `x + attention(norm(x))`, then `x + mlp(norm(x))`.
#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    attention_norm: LayerNorm<B>,
    attention: CausalSelfAttention<B>,
    feed_forward_norm: LayerNorm<B>,
    feed_forward: FeedForward<B>,
}

impl<B: Backend> Block<B> {
    pub(super) fn new(config: &GptConfig, device: &B::Device) -> Self {
        let norm = || LayerNormConfig::new(config.width).init(device);
        Self {
            attention_norm: norm(),
            attention: CausalSelfAttention::new(config, device),
            feed_forward_norm: norm(),
            feed_forward: FeedForward::new(config, device),
        }
    }

    /// # Shapes
    ///
    /// - stream, output: `[batch, time, width]`
    pub fn forward(&self, stream: Tensor<B, 3>) -> Tensor<B, 3> {
        let normed = self.attention_norm.forward(stream.clone());
        let stream = stream + self.attention.forward(normed);

        let normed = self.feed_forward_norm.forward(stream.clone());
        stream + self.feed_forward.forward(normed)
    }
}

/// The MLP of a block: four times as wide inside, with a GELU.
#[derive(Module, Debug)]
pub struct FeedForward<B: Backend> {
    inner: Linear<B>,
    gelu: Gelu,
    output: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> FeedForward<B> {
    fn new(config: &GptConfig, device: &B::Device) -> Self {
        let hidden = 4 * config.width;
        Self {
            inner: LinearConfig::new(config.width, hidden)
                .with_initializer(init::WEIGHT)
                .init(device),
            gelu: Gelu::new(),
            output: LinearConfig::new(hidden, config.width)
                .with_initializer(init::residual_weight(config.layers))
                .init(device),
            dropout: DropoutConfig::new(config.dropout).init(),
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, time, width]`
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let hidden = self.gelu.forward(self.inner.forward(x));
        self.dropout.forward(self.output.forward(hidden))
    }
}
