//! The gradients of attention, a block of queries at a time.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata};

use super::Operands;
use super::blocks::{Block, assigned, joined, part};
use crate::precision::{cast, raise};
use crate::softmax::softmax_backward;

#[derive(Debug)]
pub(super) struct Attention;

/// With three operands, or four with a bias.
impl<B: Backend, const N: usize> Backward<B, N> for Attention {
    type State = Operands<B>;

    fn backward(self, ops: Ops<Self::State, N>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let mut given = ops.parents.into_iter();
        let parents = [(); 4].map(|()| given.next().flatten());
        let mut sums = Sums::new(parents.each_ref().map(Option::is_some));
        // The last block has all keys, so its gradients of keys and values are the first that
        // others are added to.
        for block in ops.state.blocks().iter().rev() {
            sums.add(&ops.state, &gradient, block);
        }
        for (parent, gradient) in parents.into_iter().zip(sums.finish(&ops.state)) {
            if let (Some(parent), Some(gradient)) = (parent, gradient) {
                gradients.register::<B>(parent.id, gradient);
            }
        }
    }
}

/// The gradients of the blocks so far.
struct Sums<B: Backend> {
    /// Whether query, key, value and bias have a gradient.
    is_tracked: [bool; 4],
    /// Of each block, the last block first: `[batch, heads, queries of the block, width]`.
    query: Vec<FloatTensor<B>>,
    /// Of all keys, in f32 while there are several blocks of 16 bits.
    key: Option<FloatTensor<B>>,
    /// As `key`.
    value: Option<FloatTensor<B>>,
    /// Of each block, the last block first, in the bias's own sizes but for the queries of the
    /// block.
    bias: Vec<FloatTensor<B>>,
}

impl<B: Backend> Sums<B> {
    fn new(is_tracked: [bool; 4]) -> Self {
        Self {
            is_tracked,
            query: Vec::new(),
            key: None,
            value: None,
            bias: Vec::new(),
        }
    }

    fn add(&mut self, operands: &Operands<B>, gradient: &FloatTensor<B>, block: &Block) {
        let [of_query, of_key, of_value, of_bias] = self.is_tracked;
        let dtype = operands.query.dtype();
        let layout = operands.layout;
        let gradient = layout.rows::<B>(gradient, block);
        let probabilities = operands.probabilities(block);
        if of_value {
            let low = cast::<B>(probabilities.of_keys.clone(), dtype);
            let part = B::float_matmul(B::float_transpose(low), gradient.clone());
            add_to_first::<B>(&mut self.value, part);
        }
        if !(of_query || of_key || of_bias) {
            return;
        }
        let value = layout.keys::<B>(&operands.value, block);
        let product = B::float_matmul(gradient, B::float_transpose(value));
        let of_probabilities = raise::<B>(product);
        let mut of_scores = softmax_backward::<B>(probabilities.of_keys, of_probabilities, 3);
        if of_bias && let Some(bias) = &operands.bias {
            let whole = layout.ungroup::<B>(of_scores.clone());
            self.bias.push(shared::<B>(whole, &bias.shape()));
        }
        if let Some(tanh) = probabilities.tanh {
            // The derivative of `softcap tanh(x / softcap)` is `1 - tanh²`.
            let square = B::float_mul(tanh.clone(), tanh);
            let slope = B::float_add_scalar(B::float_neg(square), 1.0.into());
            of_scores = B::float_mul(of_scores, slope);
        }
        let of_scores = cast::<B>(of_scores, dtype);
        // The scale is applied last, to the fewest elements.
        let scaled = |product| B::float_mul_scalar(product, operands.scale.into());
        if of_query {
            let key = layout.keys::<B>(&operands.key, block);
            let product = B::float_matmul(of_scores.clone(), key);
            self.query.push(layout.ungroup::<B>(scaled(product)));
        }
        if of_key {
            let query = layout.rows::<B>(&operands.query, block);
            let product = B::float_matmul(B::float_transpose(of_scores), query);
            add_to_first::<B>(&mut self.key, scaled(product));
        }
    }

    /// The gradients of query, key, value and bias, in their types.
    fn finish(self, operands: &Operands<B>) -> [Option<FloatTensor<B>>; 4] {
        let dtype = operands.query.dtype();
        let cast_to = |dtype: DType| move |gradient| cast::<B>(gradient, dtype);
        let bias = operands.bias.as_ref().and_then(|bias| {
            let is_shared = bias.shape()[2] == 1;
            let parts = self.bias.into_iter();
            let gradient = if is_shared {
                parts.reduce(B::float_add)
            } else {
                in_order::<B>(parts.collect())
            };
            gradient.map(cast_to(bias.dtype()))
        });
        [
            in_order::<B>(self.query),
            self.key.map(cast_to(dtype)),
            self.value.map(cast_to(dtype)),
            bias,
        ]
    }
}

/// The parts of all queries, which are there with the last ones first, as one tensor.
fn in_order<B: Backend>(mut parts: Vec<FloatTensor<B>>) -> Option<FloatTensor<B>> {
    parts.reverse();
    joined::<B>(parts)
}

/// Adds a block's gradient to that of the first keys, in f32: so that many small parts are rounded
/// once.
fn add_to_first<B: Backend>(sum: &mut Option<FloatTensor<B>>, part: FloatTensor<B>) {
    let Some(so_far) = sum.take() else {
        *sum = Some(part);
        return;
    };
    let (so_far, part) = (raise::<B>(so_far), raise::<B>(part));
    let (shape, of_part) = (part.shape(), 0..part.shape()[2]);
    let first = self::part::<B>(&so_far, 2, of_part.clone());
    // As rows without gaps: burn-flex adds a part of a tensor element by element.
    let flat = Shape::new([shape.num_elements()]);
    let [part, first] = [part, first].map(|tensor| B::float_reshape(tensor, flat.clone()));
    let added = B::float_reshape(B::float_add(part, first), shape);
    *sum = Some(assigned::<B>(so_far, 2, of_part, added));
}

/// The gradient of a bias that has 1 in the dimensions that share it: summed over these.
fn shared<B: Backend>(gradient: FloatTensor<B>, bias: &Shape) -> FloatTensor<B> {
    let sum = |gradient: FloatTensor<B>, dim| {
        if bias[dim] == 1 && gradient.shape()[dim] > 1 {
            B::float_sum_dim(gradient, dim)
        } else {
            gradient
        }
    };
    (0..4).fold(gradient, sum)
}
