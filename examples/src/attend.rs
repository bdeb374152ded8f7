//! Causal attention, for the models of these examples.

use burn::prelude::*;
use burn::tensor::activation::softmax;
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn_decorator::fused::has_fused_backward;

/// `softmax(query keyᵗ / √features + mask) value`, the mask closing what lies after a query, and
/// what `closed` has as true. Heads of queries may share a head of keys and values: `heads` is a
/// multiple of `key heads`.
///
/// Burn's `attention`, where it is one operation. Elsewhere its softmax supports fully masked rows
/// and is differentiated through the row's maximum, which under autodiff costs more in every
/// training step, and it takes no shared heads. Here no row is fully masked, because every token
/// may read itself (`closed` is false there), and shared heads are repeated.
///
/// # Shapes
///
/// - query, output: `[batch, heads, time, features]`
/// - key, value: `[batch, key heads, time, features]`
/// - closed: `[batch, 1, time, time]`, a row for each query
pub fn attend<B: Backend>(
    query: Tensor<B, 4>,
    key: Tensor<B, 4>,
    value: Tensor<B, 4>,
    closed: Option<Tensor<B, 4, Bool>>,
) -> Tensor<B, 4> {
    let [_, heads, time, features] = query.dims();
    let device = query.device();
    if has_fused_backward(|| B::ad_enabled(&device)) {
        let options = AttentionModuleOptions {
            is_causal: true,
            ..Default::default()
        };
        return attention(query, key, value, closed, None, options);
    }
    // The query is scaled before the product: it is smaller than the scores, and they stay within
    // the range of f16.
    let scaled = query / (features as f64).sqrt();
    let scores = scaled.matmul(repeated(key, heads).transpose());
    let later: Tensor<B, 4, Bool> =
        Tensor::<B, 2, Bool>::tril_mask([time, time], 0, &device).unsqueeze();
    let masked = match closed {
        Some(closed) => {
            let square = closed.dims();
            closed.bool_or(later.expand(square))
        }
        None => later,
    };
    let scores = scores.mask_fill(masked, f32::NEG_INFINITY);
    softmax(scores, 3).matmul(repeated(value, heads))
}

/// Each head as often as queries share it.
fn repeated<B: Backend>(tensor: Tensor<B, 4>, heads: usize) -> Tensor<B, 4> {
    let [batch, key_heads, time, features] = tensor.dims();
    if key_heads == heads {
        return tensor;
    }
    let each = [batch, key_heads, heads / key_heads, time, features];
    let repeated = tensor.unsqueeze_dim::<5>(2).expand(each);
    repeated.reshape([batch, heads, time, features])
}
