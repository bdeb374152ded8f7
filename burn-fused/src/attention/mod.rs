//! Attention in memory that is linear in the length, differentiated from its operands.
//!
//! The scores of all queries and keys never exist together: forward and backward take a block of
//! queries at a time, with all the keys that it may attend to (Rabe and Staats, arXiv 2112.05682;
//! FlashAttention, arXiv 2205.14135, section 3.1). A block has whole rows of scores, so its softmax
//! is that of the whole row, and no running maximum and sum are carried from one block of keys to
//! the next. Backward computes a block's probabilities again, from the same operands by the same
//! operations: to the same bits.
//!
//! `blocks.rs` says which queries and keys a block has, and cuts operands; `scores.rs` computes its
//! probabilities; `backward.rs` its part of the gradients.

mod backward;
mod blocks;
mod scores;

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, TensorMetadata};
use burn_decorator::autodiff::{TapeBackend, record};

use crate::precision::cast;
use backward::Attention;
use blocks::{Block, Layout, joined};

/// `softmax(query keyᵀ scale) value`, the softmax in at least f32, 0 in rows that are masked in
/// full.
///
/// Several heads of queries may share one head of keys and values (grouped queries), which are not
/// copied for it. Composed by `A` if the shapes are of no such heads.
pub(crate) fn attention<A: TapeBackend>(
    query: FloatTensor<A>,
    key: FloatTensor<A>,
    value: FloatTensor<A>,
    mask: Option<BoolTensor<A>>,
    bias: Option<FloatTensor<A>>,
    options: AttentionModuleOptions,
) -> FloatTensor<A> {
    if let Some(softcap) = options.softcap {
        assert!(softcap > 0.0, "softcap must be positive, got {softcap}");
    }
    let Some(layout) = Layout::of(query.shape(), key.shape(), value.shape()) else {
        return A::attention(query, key, value, mask, bias, options);
    };
    let operands = Operands::<A::InnerBackend> {
        query: query.primitive.clone(),
        key: key.primitive.clone(),
        value: value.primitive.clone(),
        mask: mask.map(A::bool_inner),
        bias: bias.as_ref().map(|bias| bias.primitive.clone()),
        scale: options.scale.unwrap_or(1.0 / (layout.width as f64).sqrt()),
        softcap: options.softcap,
        is_causal: options.is_causal,
        layout,
    };
    let result = operands.attend();
    match &bias {
        Some(bias) => record(Attention, [&query, &key, &value, bias], operands, result),
        None => record(Attention, [&query, &key, &value], operands, result),
    }
}

/// The operands and options, which are all that backward keeps.
#[derive(Clone, Debug)]
struct Operands<B: Backend> {
    /// `[batch, heads, queries, width]`
    query: FloatTensor<B>,
    /// `[batch, key heads, keys, width]`
    key: FloatTensor<B>,
    /// `[batch, key heads, keys, value width]`
    value: FloatTensor<B>,
    /// `[batch, heads, queries, keys]`, or 1 in a dimension that shares it: true where a query may
    /// not attend to a key.
    mask: Option<BoolTensor<B>>,
    /// As `mask`, added to the scores.
    bias: Option<FloatTensor<B>>,
    scale: f64,
    softcap: Option<f64>,
    is_causal: bool,
    layout: Layout,
}

impl<B: Backend> Operands<B> {
    fn attend(&self) -> FloatTensor<B> {
        let of_block = |block: &Block| {
            let of_keys = self.probabilities(block).of_keys;
            let probabilities = cast::<B>(of_keys, self.query.dtype());
            let value = self.layout.keys::<B>(&self.value, block);
            let result = B::float_matmul(probabilities, value);
            self.layout.ungroup::<B>(result)
        };
        let results = self.blocks().iter().map(of_block).collect();
        joined::<B>(results).expect("there are queries")
    }

    fn blocks(&self) -> Vec<Block> {
        // A bias may have a gradient for every key: a block with all keys has it whole.
        let is_cut = self.is_causal && self.bias.is_none();
        self.layout.blocks(is_cut)
    }
}
