//! Blocks of queries, with the keys that they may attend to, and the parts of operands that belong
//! to them.

use std::ops::Range;

use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Shape, Slice, TensorMetadata};

/// Scores of a head in one block: sequences of up to 256 queries and keys are one block.
const BLOCK_SCORES: usize = 1 << 16;

/// Queries of a block at least, so that its matrix products are worth their launches: beyond 1,024
/// keys a block grows with their number.
const LEAST_QUERIES: usize = 64;

/// The sizes of attention's operands.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    batch: usize,
    heads: usize,
    key_heads: usize,
    queries: usize,
    pub keys: usize,
    pub width: usize,
}

/// Some queries, and the keys that they may attend to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub queries: Range<usize>,
    /// The first so many keys.
    pub keys: usize,
}

impl Layout {
    /// `None` unless the heads of queries are a multiple of those of keys and values, and all else
    /// fits.
    pub fn of(query: Shape, key: Shape, value: Shape) -> Option<Self> {
        let [batch, heads, queries, width] = query.dims::<4>();
        let [key_batch, key_heads, keys, key_width] = key.dims::<4>();
        let [value_batch, value_heads, values, _] = value.dims::<4>();
        let fits = (key_batch, value_batch) == (batch, batch)
            && (values, value_heads, key_width) == (keys, key_heads, width)
            && key_heads > 0
            && heads % key_heads == 0
            && queries > 0
            && keys > 0;
        fits.then_some(Self {
            batch,
            heads,
            key_heads,
            queries,
            keys,
            width,
        })
    }

    /// Heads of queries for each head of keys.
    fn group(self) -> usize {
        self.heads / self.key_heads
    }

    /// The blocks in the order of their queries. If `is_cut`, each has the keys up to that of its
    /// last query only: in causal attention the last key belongs to the last query, as in Burn's
    /// own attention.
    pub fn blocks(self, is_cut: bool) -> Vec<Block> {
        let step = (BLOCK_SCORES / self.keys).max(LEAST_QUERIES);
        let block = |start| {
            let end = self.queries.min(start + step);
            let visible = (end + self.keys).saturating_sub(self.queries);
            Block {
                queries: start..end,
                keys: if is_cut {
                    visible.clamp(1, self.keys)
                } else {
                    self.keys
                },
            }
        };
        (0..self.queries).step_by(step).map(block).collect()
    }

    /// Whether causal attention has queries that may attend to no key.
    pub fn has_queries_before_keys(self) -> bool {
        self.queries > self.keys
    }

    /// The place of the first query of a block among the keys; negative if there are more queries
    /// than keys.
    pub fn first_position(self, block: &Block) -> i64 {
        block.queries.start as i64 + self.keys as i64 - self.queries as i64
    }

    /// The block's rows of a tensor `[batch, heads, queries, n]`: `[batch, key heads, rows, n]`,
    /// where a row is a query of one of the heads that share a head of keys.
    pub fn rows<B: Backend>(self, tensor: &FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        let rows = part::<B>(tensor, 2, block.queries.clone());
        self.group_rows::<B>(rows)
    }

    /// `[batch, heads, queries, n]` as `[batch, key heads, rows, n]`.
    pub fn group_rows<B: Backend>(self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        if self.group() == 1 {
            return tensor;
        }
        let grouped = self.grouped(&tensor.shape());
        B::float_reshape(tensor, grouped)
    }

    /// As [`Self::group_rows`].
    pub fn group_mask<B: Backend>(self, mask: BoolTensor<B>) -> BoolTensor<B> {
        if self.group() == 1 {
            return mask;
        }
        let grouped = self.grouped(&mask.shape());
        B::bool_reshape(mask, grouped)
    }

    fn grouped(self, shape: &Shape) -> Shape {
        let [batch, _, queries, n] = shape.dims::<4>();
        Shape::new([batch, self.key_heads, self.group() * queries, n])
    }

    /// The reverse of [`Self::group_rows`].
    pub fn ungroup<B: Backend>(self, tensor: FloatTensor<B>) -> FloatTensor<B> {
        if self.group() == 1 {
            return tensor;
        }
        let [batch, _, rows, n] = tensor.shape().dims::<4>();
        let whole = Shape::new([batch, self.heads, rows / self.group(), n]);
        B::float_reshape(tensor, whole)
    }

    /// The block's keys of a tensor `[batch, key heads, keys, n]`.
    pub fn keys<B: Backend>(self, tensor: &FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        part::<B>(tensor, 2, 0..block.keys)
    }

    /// The shape of scores before heads are grouped.
    pub fn scores(self, queries: usize, keys: usize) -> Shape {
        Shape::new([self.batch, self.heads, queries, keys])
    }

    /// The block's part of a mask, which has 1 in the dimensions that share it.
    pub fn mask<B: Backend>(self, mask: &BoolTensor<B>, block: &Block) -> BoolTensor<B> {
        let slices = scores_slices(&mask.shape(), block);
        let shape = self.scores(block.queries.len(), block.keys);
        B::bool_expand(B::bool_slice(mask.clone(), &slices), shape)
    }

    /// The block's part of a bias, which has 1 in the dimensions that share it.
    pub fn bias<B: Backend>(self, bias: &FloatTensor<B>, block: &Block) -> FloatTensor<B> {
        let slices = scores_slices(&bias.shape(), block);
        let shape = self.scores(block.queries.len(), block.keys);
        B::float_expand(B::float_slice(bias.clone(), &slices), shape)
    }
}

fn scores_slices(shape: &Shape, block: &Block) -> [Slice; 4] {
    let [batch, heads, queries, keys] = shape.dims::<4>();
    let of = |size: usize, range: Range<usize>| Slice::from(if size == 1 { 0..1 } else { range });
    [
        Slice::from(0..batch),
        Slice::from(0..heads),
        of(queries, block.queries.clone()),
        of(keys, 0..block.keys),
    ]
}

/// A range of one dimension; the tensor itself if that is all of it.
pub(super) fn part<B: Backend>(
    tensor: &FloatTensor<B>,
    dim: usize,
    range: Range<usize>,
) -> FloatTensor<B> {
    let shape = tensor.shape();
    if range == (0..shape[dim]) {
        return tensor.clone();
    }
    B::float_slice(tensor.clone(), &slices_of(&shape, dim, range))
}

/// The tensor with this in a range of one dimension, which is written in place where nothing else
/// holds the tensor.
pub(super) fn assigned<B: Backend>(
    tensor: FloatTensor<B>,
    dim: usize,
    range: Range<usize>,
    part: FloatTensor<B>,
) -> FloatTensor<B> {
    let shape = tensor.shape();
    if range == (0..shape[dim]) {
        return part;
    }
    B::float_slice_assign(tensor, &slices_of(&shape, dim, range), part)
}

fn slices_of(shape: &Shape, dim: usize, range: Range<usize>) -> Vec<Slice> {
    let whole = shape.iter().map(|size| Slice::from(0..*size));
    let mut slices: Vec<_> = whole.collect();
    slices[dim] = Slice::from(range);
    slices
}

/// The parts of all queries, in their order, as one tensor; `None` of no parts.
pub(super) fn joined<B: Backend>(mut parts: Vec<FloatTensor<B>>) -> Option<FloatTensor<B>> {
    if parts.len() < 2 {
        parts.pop()
    } else {
        Some(B::float_cat(parts, 2))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(queries: usize, keys: usize) -> Layout {
        let query = Shape::new([2, 4, queries, 8]);
        let key = Shape::new([2, 2, keys, 8]);
        Layout::of(query, key.clone(), key).expect("two heads of queries for each of keys")
    }

    #[test]
    fn short_sequences_are_one_block() {
        let whole = Block {
            queries: 0..256,
            keys: 256,
        };
        assert_eq!(layout(256, 256).blocks(true), [whole]);
    }

    #[test]
    fn blocks_cover_all_queries_and_causal_ones_no_later_key() {
        for (queries, keys) in [(1000, 1000), (300, 2000), (2000, 300), (1, 5000), (5000, 1)] {
            let layout = layout(queries, keys);
            let blocks = layout.blocks(true);
            let covered: Vec<_> = blocks
                .iter()
                .flat_map(|block| block.queries.clone())
                .collect();
            assert_eq!(covered, (0..queries).collect::<Vec<_>>());
            for block in &blocks {
                let last = layout.first_position(block) + block.queries.len() as i64;
                assert_eq!(block.keys as i64, last.clamp(1, keys as i64));
            }
            assert_eq!(blocks.last().map(|block| block.keys), Some(keys));
        }
    }

    #[test]
    fn a_block_has_rows_in_proportion_to_the_length() {
        let scores = |length: usize| {
            let blocks = layout(length, length).blocks(false);
            blocks[0].queries.len() * length
        };
        assert!(scores(1 << 10) <= BLOCK_SCORES);
        assert_eq!(scores(1 << 14), 16 * scores(1 << 10));
    }

    #[test]
    fn heads_that_do_not_divide_are_none() {
        let query = Shape::new([1, 3, 4, 8]);
        let key = Shape::new([1, 2, 4, 8]);
        assert!(Layout::of(query, key.clone(), key).is_none());
    }
}
