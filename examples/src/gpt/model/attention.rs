//! Causal multi-head self-attention.

use burn::nn::{Dropout, DropoutConfig, Linear, LinearConfig};
use burn::prelude::*;

use super::{GptConfig, init};
use crate::attend::attend;

/// Every token reads from itself and the tokens before it.
///
/// Queries, keys and values are one projection, so that a decorator that casts or keeps its input
/// does so once and not three times, as for burn-nn's `MultiHeadAttention`.
#[derive(Module, Debug)]
pub struct CausalSelfAttention<B: Backend> {
    query_key_value: Linear<B>,
    output: Linear<B>,
    dropout: Dropout,
    heads: usize,
}

impl<B: Backend> CausalSelfAttention<B> {
    pub(super) fn new(config: &GptConfig, device: &B::Device) -> Self {
        let GptConfig { width, heads, .. } = *config;
        assert!(
            heads > 0 && width.is_multiple_of(heads),
            "{heads} heads do not divide a width of {width}"
        );
        Self {
            query_key_value: LinearConfig::new(width, 3 * width)
                .with_initializer(init::WEIGHT)
                .init(device),
            output: LinearConfig::new(width, width)
                .with_initializer(init::residual_weight(config.layers))
                .init(device),
            dropout: DropoutConfig::new(config.dropout).init(),
            heads,
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, time, width]`
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let [batch, time, width] = x.dims();
        let projected = self.query_key_value.forward(x).chunk(3, 2);
        let [query, key, value] = projected.try_into().expect("three chunks");
        let by_head = |x: Tensor<B, 3>| {
            x.reshape([batch, time, self.heads, width / self.heads])
                .swap_dims(1, 2)
        };

        let read = attend(by_head(query), by_head(key), by_head(value), None);

        let joined = read.swap_dims(1, 2).reshape([batch, time, width]);
        self.dropout.forward(self.output.forward(joined))
    }
}
