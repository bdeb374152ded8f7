//! Attention, differentiated from query, key and value: its probabilities are computed again (FlashAttention, arXiv 2205.14135, section 3.1),
//! one layer's at a time.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::ops::{AttentionModuleOptions, FloatTensorOps};
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, Scalar, Shape, TensorMetadata, get_device_settings};

use burn_decorator::autodiff::{TapeBackend, record};

use crate::precision::{cast, raise};
use crate::softmax::softmax_backward;

/// `softmax(query keyᵀ scale) value`, the softmax in at least f32, 0 in rows that are masked in full. Composed by `A` with a bias, a soft
/// cap, or fewer heads of keys and values than of queries.
pub(super) fn attention<A: TapeBackend>(
    query: FloatTensor<A>,
    key: FloatTensor<A>,
    value: FloatTensor<A>,
    mask: Option<BoolTensor<A>>,
    bias: Option<FloatTensor<A>>,
    options: AttentionModuleOptions,
) -> FloatTensor<A> {
    let heads = |x: &FloatTensor<A>| x.shape()[..2].to_vec();
    let is_same = heads(&query) == heads(&key) && heads(&query) == heads(&value);
    if bias.is_some() || options.softcap.is_some() || !is_same {
        return A::attention(query, key, value, mask, bias, options);
    }
    let width = query.shape()[3];
    let saved = Saved::<A::InnerBackend> {
        query: query.primitive.clone(),
        key: key.primitive.clone(),
        value: value.primitive.clone(),
        mask: mask.map(A::bool_inner),
        is_causal: options.is_causal,
        scale: options.scale.unwrap_or(1.0 / (width as f64).sqrt()),
    };
    let probabilities = cast::<A::InnerBackend>(saved.probabilities(), query.dtype());
    let result = A::InnerBackend::float_matmul(probabilities, value.primitive.clone());
    record(Attention, [&query, &key, &value], saved, result)
}

/// What backward needs.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    value: FloatTensor<B>,
    mask: Option<BoolTensor<B>>,
    is_causal: bool,
    scale: f64,
}

impl<B: Backend> Saved<B> {
    /// `softmax(query keyᵀ scale)`, f32 where the operands have 16 bits.
    fn probabilities(&self) -> FloatTensor<B> {
        let scores = B::float_matmul(self.query.clone(), B::float_transpose(self.key.clone()));
        let mut scores = B::float_mul_scalar(raise::<B>(scores), self.scale.into());
        // Finite, so that a row that is masked in full has no NaN.
        let least = scores.dtype().finfo().expect("a float tensor").min;
        let shape = scores.shape();
        let causal = self.is_causal.then(|| later::<B>(&scores));
        for mask in self.mask.iter().chain(&causal) {
            scores = B::float_mask_fill(scores, mask.clone(), Scalar::Float(least));
        }
        let mut probabilities = B::softmax(scores, 3);
        // Only a given mask, or more queries than keys, can mask a row in full, which then has probabilities to clear.
        if self.mask.is_some() || shape[2] > shape[3] {
            for mask in self.mask.iter().chain(&causal) {
                probabilities = B::float_mask_fill(probabilities, mask.clone(), Scalar::Float(0.0));
            }
        }
        probabilities
    }
}

/// True where a key comes after a query; the last key is at the last query, as in Burn's own attention.
fn later<B: Backend>(scores: &FloatTensor<B>) -> BoolTensor<B> {
    let device = B::float_device(scores);
    let shape = scores.shape();
    let [queries, keys] = [shape[2], shape[3]];
    let settings = get_device_settings::<B>(&device);
    let first = keys as i64 - queries as i64;
    let query = B::int_arange(first..keys as i64, &device, settings.int_dtype);
    let key = B::int_arange(0..keys as i64, &device, settings.int_dtype);
    let query = B::int_reshape(query, Shape::new([1, 1, queries, 1]));
    let key = B::int_reshape(key, Shape::new([1, 1, 1, keys]));
    let mask = B::int_lower(query, key, settings.bool_dtype);
    B::bool_expand(mask, shape)
}

#[derive(Debug)]
struct Attention;

impl<B: Backend> Backward<B, 3> for Attention {
    type State = Saved<B>;

    fn backward(self, ops: Ops<Self::State, 3>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let saved = ops.state;
        let [of_query, of_key, of_value] = ops.parents;
        let dtype = saved.query.dtype();
        let probabilities = saved.probabilities();
        if let Some(node) = of_value {
            let low = cast::<B>(probabilities.clone(), dtype);
            let of_value = B::float_matmul(B::float_transpose(low), gradient.clone());
            gradients.register::<B>(node.id, of_value);
        }
        if of_query.is_none() && of_key.is_none() {
            return;
        }
        let of_probabilities = B::float_matmul(gradient, B::float_transpose(saved.value));
        let of_scores = softmax_backward::<B>(probabilities, raise::<B>(of_probabilities), 3);
        let of_scores = cast::<B>(of_scores, dtype);
        // The scale is applied last, to the fewest elements.
        let scale: Scalar = saved.scale.into();
        if let Some(node) = of_query {
            let product = B::float_matmul(of_scores.clone(), saved.key);
            gradients.register::<B>(node.id, B::float_mul_scalar(product, scale));
        }
        if let Some(node) = of_key {
            let product = B::float_matmul(B::float_transpose(of_scores), saved.query);
            gradients.register::<B>(node.id, B::float_mul_scalar(product, scale));
        }
    }
}
