//! The probabilities of one block of queries.

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Scalar, Shape, TensorMetadata, get_device_settings};

use super::Operands;
use super::blocks::Block;
use crate::precision::raise;

/// A block's probabilities, with what its gradient needs beside them.
/// `[batch, key heads, rows, keys]`, f32 where the operands have 16 bits.
pub(super) struct Probabilities<B: Backend> {
    pub of_keys: FloatTensor<B>,
    /// `tanh(scores / softcap)`, where scores are capped.
    pub tanh: Option<FloatTensor<B>>,
}

impl<B: Backend> Operands<B> {
    /// `softmax(query keyᵀ scale)` of a block.
    pub(super) fn probabilities(&self, block: &Block) -> Probabilities<B> {
        let query = self.layout.rows::<B>(&self.query, block);
        let key = self.layout.keys::<B>(&self.key, block);
        let product = B::float_matmul(query, B::float_transpose(key));
        let mut scores = B::float_mul_scalar(raise::<B>(product), self.scale.into());
        let mut tanh = None;
        if let Some(softcap) = self.softcap {
            let capped = B::float_tanh(B::float_div_scalar(scores, softcap.into()));
            scores = B::float_mul_scalar(capped.clone(), softcap.into());
            tanh = Some(capped);
        }
        let masks = self.masks(block);
        let of_keys = match &self.bias {
            Some(bias) => {
                let of_block = self.layout.bias::<B>(bias, block);
                let of_rows = raise::<B>(self.layout.group_rows::<B>(of_block));
                let biased = B::float_add(scores, of_rows);
                softmax_of_infinite::<B>(fill::<B>(biased, &masks, f64::NEG_INFINITY))
            }
            None => self.softmax_of_finite(scores, &masks),
        };
        Probabilities { of_keys, tanh }
    }

    /// The masks of a block's scores.
    fn masks(&self, block: &Block) -> Vec<BoolTensor<B>> {
        let given = self
            .mask
            .as_ref()
            .map(|mask| self.layout.mask::<B>(mask, block));
        let causal = self.is_causal.then(|| self.later_keys(block));
        let masks = given.into_iter().chain(causal);
        masks
            .map(|mask| self.layout.group_mask::<B>(mask))
            .collect()
    }

    /// True where a key comes after a query; the last key is at the last query, as in Burn's own
    /// attention.
    fn later_keys(&self, block: &Block) -> BoolTensor<B> {
        let device = B::float_device(&self.query);
        let settings = get_device_settings::<B>(&device);
        let first = self.layout.first_position(block);
        let last = first + block.queries.len() as i64;
        let query = B::int_arange(first..last, &device, settings.int_dtype);
        let key = B::int_arange(0..block.keys as i64, &device, settings.int_dtype);
        let query = B::int_reshape(query, Shape::new([1, 1, block.queries.len(), 1]));
        let key = B::int_reshape(key, Shape::new([1, 1, 1, block.keys]));
        let mask = B::int_lower(query, key, settings.bool_dtype);
        B::bool_expand(mask, self.layout.scores(block))
    }

    /// The softmax of finite scores, in the backend's own kernel, with 0 where a mask is true.
    fn softmax_of_finite(&self, scores: FloatTensor<B>, masks: &[BoolTensor<B>]) -> FloatTensor<B> {
        // Finite, so that a row that is masked in full has no NaN.
        let least = scores.dtype().finfo().expect("a float tensor").min;
        let probabilities = B::softmax(fill::<B>(scores, masks, least), 3);
        // Only a given mask, or more queries than keys, can mask a row in full, which then has
        // probabilities to clear.
        if self.mask.is_some() || self.layout.has_queries_before_keys() {
            fill::<B>(probabilities, masks, 0.0)
        } else {
            probabilities
        }
    }
}

/// The softmax of scores that a mask or a bias may have made `-inf`, 0 in rows that are `-inf` in
/// full: by the formula of Burn's own attention.
fn softmax_of_infinite<B: Backend>(scores: FloatTensor<B>) -> FloatTensor<B> {
    let finfo = scores.dtype().finfo().expect("a float tensor");
    let largest = B::float_clamp_min(B::float_max_dim(scores.clone(), 3), finfo.min.into());
    let numerator = B::float_exp(B::float_sub(scores, largest));
    let sum = B::float_sum_dim(numerator.clone(), 3);
    B::float_div(
        numerator,
        B::float_clamp_min(sum, finfo.min_positive.into()),
    )
}

fn fill<B: Backend>(tensor: FloatTensor<B>, masks: &[BoolTensor<B>], value: f64) -> FloatTensor<B> {
    let fill = |tensor, mask: &BoolTensor<B>| {
        B::float_mask_fill(tensor, mask.clone(), Scalar::Float(value))
    };
    masks.iter().fold(tensor, fill)
}
