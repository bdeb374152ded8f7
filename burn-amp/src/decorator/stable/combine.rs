//! Differences and products of low tensors, which an f32 operation computes again.

use burn_backend::{Backend, tensor::FloatTensor};

use super::{Call, Tensor};
use crate::decorator::ops::Row;
use crate::decorator::origin::Origin;
use crate::decorator::tensor::AutocastTensor;
use crate::policy::Policy;

fn combine<B: Backend, P: Policy>(
    row: Row,
    a: Tensor<B>,
    b: Tensor<B>,
    run: fn(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B>,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&a, &b]);
    if !call.mends || !call.is_low {
        return call.wrap::<B>(run(
            a.brought::<B>(call.target),
            b.brought::<B>(call.target),
        ));
    }
    let result = run(
        a.clone().brought::<B>(call.target),
        b.clone().brought::<B>(call.target),
    );
    let [a, b] = [a.kept(), b.kept()];
    let steps = a.steps().max(b.steps());
    let wide = move || run(a.clone().raised::<B>(), b.clone().raised::<B>());
    AutocastTensor::with_lineage(result, call.lineage).with_origin(Origin::computed(steps, wide))
}

pub(in crate::decorator) fn float_sub<B: Backend, P: Policy>(
    row: Row,
    a: Tensor<B>,
    b: Tensor<B>,
) -> Tensor<B> {
    combine::<B, P>(row, a, b, B::float_sub)
}

pub(in crate::decorator) fn float_mul<B: Backend, P: Policy>(
    row: Row,
    a: Tensor<B>,
    b: Tensor<B>,
) -> Tensor<B> {
    combine::<B, P>(row, a, b, B::float_mul)
}
