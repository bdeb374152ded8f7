//! Causal self-attention whose heads of queries share heads of keys and values.

use burn::nn::{RmsNorm, RmsNormConfig};
use burn::prelude::*;

use super::{Architecture, Layout, LlmConfig, Projection, normalised};
use crate::attend::attend;

/// Every token reads from itself and the tokens of its document before it (grouped queries: Ainslie
/// et al., arXiv 2305.13245).
#[derive(Module, Debug)]
pub struct GroupedAttention<B: Backend> {
    q_proj: Projection<B>,
    k_proj: Projection<B>,
    v_proj: Projection<B>,
    o_proj: Projection<B>,
    q_norm: Option<RmsNorm<B>>,
    k_norm: Option<RmsNorm<B>>,
    head_width: usize,
}

impl<B: Backend> GroupedAttention<B> {
    pub(super) fn new(config: &LlmConfig, device: &B::Device) -> Self {
        let queries = config.heads * config.head_width;
        let keys = config.key_heads * config.head_width;
        let has_bias = config.has_qkv_bias;
        let norm = || {
            let norm = RmsNormConfig::new(config.head_width).with_epsilon(config.norm_epsilon);
            (config.architecture == Architecture::Qwen3).then(|| norm.init(device))
        };
        Self {
            q_proj: Projection::new(config.width, queries, has_bias, device),
            k_proj: Projection::new(config.width, keys, has_bias, device),
            v_proj: Projection::new(config.width, keys, has_bias, device),
            o_proj: Projection::new(queries, config.width, config.has_output_bias, device),
            q_norm: norm(),
            k_norm: norm(),
            head_width: config.head_width,
        }
    }

    /// # Shapes
    ///
    /// - x, output: `[batch, time, width]`
    pub fn forward(&self, x: Tensor<B, 3>, layout: &Layout<B>) -> Tensor<B, 3> {
        let [batch, time, _] = x.dims();
        let by_head = |x: Tensor<B, 3>, norm: Option<&RmsNorm<B>>| {
            let heads = x.dims()[2] / self.head_width;
            let x = x.reshape([batch, time, heads, self.head_width]);
            let x = match norm {
                Some(norm) => normalised(norm, x),
                None => x,
            };
            x.swap_dims(1, 2)
        };
        let query = by_head(self.q_proj.forward(x.clone()), self.q_norm.as_ref());
        let key = by_head(self.k_proj.forward(x.clone()), self.k_norm.as_ref());
        let value = by_head(self.v_proj.forward(x), None);
        let (query, key) = (layout.rotation.rotate(query), layout.rotation.rotate(key));
        let read = attend(query, key, value, layout.other_documents.clone());
        let [_, heads, _, head_width] = read.dims();
        let joined = read
            .swap_dims(1, 2)
            .reshape([batch, time, heads * head_width]);
        self.o_proj.forward(joined)
    }

    pub(super) fn projections(&self) -> [(&'static str, &Projection<B>); 4] {
        [
            ("q_proj", &self.q_proj),
            ("k_proj", &self.k_proj),
            ("v_proj", &self.v_proj),
            ("o_proj", &self.o_proj),
        ]
    }

    pub(super) fn projections_mut(&mut self) -> [(&'static str, &mut Projection<B>); 4] {
        [
            ("q_proj", &mut self.q_proj),
            ("k_proj", &mut self.k_proj),
            ("v_proj", &mut self.v_proj),
            ("o_proj", &mut self.o_proj),
        ]
    }
}
