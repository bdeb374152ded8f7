//! One of the blocks.

use burn::nn::{RmsNorm, RmsNormConfig};
use burn::prelude::*;
use burn_fused::swiglu;

use super::{GroupedAttention, Layout, LlmConfig, Projection, normalised};

/// Attention, then a gated feed-forward network; each reads a normalised copy of the residual
/// stream and adds to it.
#[derive(Module, Debug)]
pub struct DecoderBlock<B: Backend> {
    input_layernorm: RmsNorm<B>,
    self_attn: GroupedAttention<B>,
    post_attention_layernorm: RmsNorm<B>,
    mlp: GatedFeedForward<B>,
}

impl<B: Backend> DecoderBlock<B> {
    pub(super) fn new(config: &LlmConfig, device: &B::Device) -> Self {
        let norm = RmsNormConfig::new(config.width).with_epsilon(config.norm_epsilon);
        Self {
            input_layernorm: norm.init(device),
            self_attn: GroupedAttention::new(config, device),
            post_attention_layernorm: norm.init(device),
            mlp: GatedFeedForward::new(config, device),
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, time, width]`
    pub fn forward(&self, x: Tensor<B, 3>, layout: &Layout<B>) -> Tensor<B, 3> {
        let read = normalised(&self.input_layernorm, x.clone());
        let x = x + self.self_attn.forward(read, layout);
        let read = normalised(&self.post_attention_layernorm, x.clone());
        x + self.mlp.forward(read)
    }

    /// The linear layers, with their paths in the block.
    pub(super) fn projections(&self) -> Vec<(String, &Projection<B>)> {
        let attention = self
            .self_attn
            .projections()
            .map(|(name, layer)| (format!("self_attn.{name}"), layer));
        let feed_forward = self
            .mlp
            .projections()
            .map(|(name, layer)| (format!("mlp.{name}"), layer));
        attention.into_iter().chain(feed_forward).collect()
    }

    /// As [`projections`](Self::projections).
    pub(super) fn projections_mut(&mut self) -> Vec<(String, &mut Projection<B>)> {
        let attention = self
            .self_attn
            .projections_mut()
            .map(|(name, layer)| (format!("self_attn.{name}"), layer));
        let feed_forward = self
            .mlp
            .projections_mut()
            .map(|(name, layer)| (format!("mlp.{name}"), layer));
        attention.into_iter().chain(feed_forward).collect()
    }
}

/// SwiGLU (Shazeer, arXiv 2002.05202): `down(silu(gate(x)) up(x))`.
#[derive(Module, Debug)]
pub struct GatedFeedForward<B: Backend> {
    gate_proj: Projection<B>,
    up_proj: Projection<B>,
    down_proj: Projection<B>,
}

impl<B: Backend> GatedFeedForward<B> {
    pub(super) fn new(config: &LlmConfig, device: &B::Device) -> Self {
        let (width, inner, bias) = (
            config.width,
            config.inner_width,
            config.has_feed_forward_bias,
        );
        Self {
            gate_proj: Projection::new(width, inner, bias, device),
            up_proj: Projection::new(width, inner, bias, device),
            down_proj: Projection::new(inner, width, bias, device),
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, time, width]`
    pub fn forward(&self, x: Tensor<B, 3>) -> Tensor<B, 3> {
        let gate = self.gate_proj.forward(x.clone());
        self.down_proj
            .forward(swiglu(gate, self.up_proj.forward(x)))
    }

    fn projections(&self) -> [(&'static str, &Projection<B>); 3] {
        [
            ("gate_proj", &self.gate_proj),
            ("up_proj", &self.up_proj),
            ("down_proj", &self.down_proj),
        ]
    }

    fn projections_mut(&mut self) -> [(&'static str, &mut Projection<B>); 3] {
        [
            ("gate_proj", &mut self.gate_proj),
            ("up_proj", &mut self.up_proj),
            ("down_proj", &mut self.down_proj),
        ]
    }
}
