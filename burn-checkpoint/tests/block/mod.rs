//! The block that tests and benches here are made of: layer norm, linear, GELU, linear, dropout,
//! residual.

use burn::module::Module;
use burn::nn::{Dropout, DropoutConfig, Gelu, LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::Tensor;
use burn::tensor::backend::Backend;

#[derive(Module, Debug)]
pub struct Block<B: Backend> {
    pub norm: LayerNorm<B>,
    pub up: Linear<B>,
    pub down: Linear<B>,
    dropout: Dropout,
}

impl<B: Backend> Block<B> {
    /// Parameters are drawn here and now, and not at their first use.
    pub fn new(width: usize, hidden: usize, dropout: f64, device: &B::Device) -> Self {
        let block = Self {
            norm: LayerNormConfig::new(width).init(device),
            up: LinearConfig::new(width, hidden).init(device),
            down: LinearConfig::new(hidden, width).init(device),
            dropout: DropoutConfig::new(dropout).init(),
        };
        for linear in [&block.up, &block.down] {
            let _ = (linear.weight.val(), linear.bias.as_ref().map(|b| b.val()));
        }
        block
    }

    /// `[tokens, width]` to as much.
    pub fn forward(&self, x: Tensor<B, 2>) -> Tensor<B, 2> {
        let hidden = Gelu::new().forward(self.up.forward(self.norm.forward(x.clone())));
        x + self.dropout.forward(self.down.forward(hidden))
    }
}
