//! Scaled dot product attention.
//!
//! Autodiff's attention is a composition of operations of its inner backend, which would run the
//! softmax in the low type and bypass the table. Over an autodiff backend it is therefore composed
//! here, from this decorator's own operations, unless a decorator of autodiff differentiates it as
//! one operation.

use burn_backend::ops::AttentionModuleOptions;
use burn_backend::ops::attention::attention_fallback;
use burn_backend::tensor::{BoolTensor, FloatTensor};
use burn_backend::{Backend, DType, FloatDType, TensorMetadata};
use burn_decorator::fused::has_fused_backward;

use super::backend::Autocast;
use super::stable::scaled;
use super::tensor::AutocastTensor;
use crate::cast::{Cast, Operands};
use crate::policy::{Mode, Off, Policy, autocast};

/// `softmax(query keyᵀ scale) value` for `[batch, heads, sequence, width]` tensors of
/// `Autocast<B, P>`.
pub(super) fn attention<B: Backend, P: Policy>(
    row: Cast,
    query: FloatTensor<Autocast<B, P>>,
    key: FloatTensor<Autocast<B, P>>,
    value: FloatTensor<Autocast<B, P>>,
    mask: Option<BoolTensor<B>>,
    bias: Option<FloatTensor<Autocast<B, P>>>,
    options: AttentionModuleOptions,
) -> FloatTensor<Autocast<B, P>> {
    let mut operands = Operands::default();
    for x in [&query, &key, &value].into_iter().chain(&bias) {
        operands.see(x.tensor.dtype().into(), x.lineage);
    }
    let mode = Mode::current::<P>();
    let class = mode.class("attention", row);
    let target = operands.target(class, mode.arithmetic);
    let lineage = operands.lineage();
    let query = query.brought::<B>(target);
    let key = key.brought::<B>(target);
    let value = value.brought::<B>(target);
    let bias = bias.map(|bias| bias.brought::<B>(target));

    // Burn's composed attention, which backends without a fused kernel use too, scales the product
    // of query and key. The unscaled product may exceed f16's range, so the operands are scaled
    // instead.
    let (query, key, options) = match mode.low() {
        Some(FloatDType::F16) if query.dtype() == DType::F16 => {
            scale_first::<B>(query, key, options)
        }
        _ => (query, key, options),
    };
    let device = B::float_device(&query);
    if B::ad_enabled(&device) && !has_fused_backward(|| B::ad_enabled(&device)) {
        let wrap = |x| AutocastTensor::result(x, lineage);
        let [query, key, value] = [query, key, value].map(wrap);
        let bias = bias.map(wrap);
        let compose =
            || attention_fallback::<Autocast<B, P>>(query, key, value, mask, bias, options);
        return match class {
            Cast::Lower => compose(),
            // An override chose the type of the operands: the matmuls must not lower it again.
            Cast::Full | Cast::Promote | Cast::Keep => autocast::<Off, _>(compose),
        };
    }
    AutocastTensor::result(
        B::attention(query, key, value, mask, bias, options),
        lineage,
    )
}

/// Query and key, each times the square root of the scale, and options that scale no further.
fn scale_first<B: Backend>(
    query: FloatTensor<B>,
    key: FloatTensor<B>,
    options: AttentionModuleOptions,
) -> (FloatTensor<B>, FloatTensor<B>, AttentionModuleOptions) {
    let width = query.shape().dims::<4>()[3];
    let scale = options.scale.unwrap_or(1.0 / (width as f64).sqrt());
    let root = scale.abs().sqrt();
    (
        scaled::<B>(query, root),
        scaled::<B>(key, root),
        AttentionModuleOptions {
            scale: Some(scale.signum()),
            ..options
        },
    )
}
