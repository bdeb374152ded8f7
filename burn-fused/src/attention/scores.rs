//! The probabilities of one block of queries.

use std::ops::Range;

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Scalar, Shape, TensorMetadata, get_device_settings};

use super::Operands;
use super::blocks::{Block, assigned, part};
use crate::precision::raise;

/// A mask of some of a block's keys.
struct Closed<B: Backend> {
    /// `[batch, key heads, rows, keys of the range]`: true where a row may not attend to a key.
    mask: BoolTensor<B>,
    keys: Range<usize>,
}

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

    /// What is closed of a block's scores.
    fn masks(&self, block: &Block) -> Vec<Closed<B>> {
        let given = self.mask.as_ref().map(|mask| Closed {
            mask: self.layout.mask::<B>(mask, block),
            keys: 0..block.keys,
        });
        let causal = self.is_causal.then(|| self.later_keys(block)).flatten();
        let masks = given.into_iter().chain(causal);
        let grouped = |closed: Closed<B>| Closed {
            mask: self.layout.group_mask::<B>(closed.mask),
            ..closed
        };
        masks.map(grouped).collect()
    }

    /// The keys that come after a query; the last key is at the last query, as in Burn's own
    /// attention. Keys up to the block's first query are open to all of its queries, and not part
    /// of the mask where they are most, as in a long sequence. `None` if there are no others.
    fn later_keys(&self, block: &Block) -> Option<Closed<B>> {
        let device = B::float_device(&self.query);
        let settings = get_device_settings::<B>(&device);
        let first = self.layout.first_position(block);
        let last = first + block.queries.len() as i64;
        let mut keys = usize::try_from(first + 1).unwrap_or(0)..block.keys;
        if keys.is_empty() {
            return None;
        }
        // To fill a part costs two copies of it.
        if 2 * keys.len() > block.keys {
            keys.start = 0;
        }
        let query = B::int_arange(first..last, &device, settings.int_dtype);
        let range = keys.start as i64..keys.end as i64;
        let key = B::int_arange(range, &device, settings.int_dtype);
        let query = B::int_reshape(query, Shape::new([1, 1, block.queries.len(), 1]));
        let key = B::int_reshape(key, Shape::new([1, 1, 1, keys.len()]));
        let mask = B::int_lower(query, key, settings.bool_dtype);
        let shape = self.layout.scores(block.queries.len(), keys.len());
        Some(Closed {
            mask: B::bool_expand(mask, shape),
            keys,
        })
    }

    /// The softmax of finite scores, in the backend's own kernel, with 0 where a mask is true.
    fn softmax_of_finite(&self, scores: FloatTensor<B>, masks: &[Closed<B>]) -> FloatTensor<B> {
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

fn fill<B: Backend>(tensor: FloatTensor<B>, masks: &[Closed<B>], value: f64) -> FloatTensor<B> {
    let fill = |tensor: FloatTensor<B>, closed: &Closed<B>| {
        let part = part::<B>(&tensor, 3, closed.keys.clone());
        let filled = B::float_mask_fill(part, closed.mask.clone(), Scalar::Float(value));
        assigned::<B>(tensor, 3, closed.keys.clone(), filled)
    };
    masks.iter().fold(tensor, fill)
}
