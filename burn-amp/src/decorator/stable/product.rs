//! The product of a dimension, pair by pair. Burn's autodiff has it as the exponential of a sum of
//! logarithms, which is NaN where a factor is negative.

use burn_backend::{Backend, Shape, Slice, TensorMetadata, tensor::FloatTensor};

use super::{Call, Tensor, is_differentiated};
use crate::decorator::ops::Row;
use crate::policy::Policy;

pub(in crate::decorator) fn float_prod<B: Backend, P: Policy>(row: Row, x: Tensor<B>) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let x = x.brought::<B>(call.target);
    let elements = x.shape().num_elements();
    if !call.mends || elements == 0 || !is_differentiated::<B>(&x) {
        return call.wrap::<B>(B::float_prod(x));
    }
    let flat = B::float_reshape(x, Shape::new([elements]));
    call.wrap::<B>(pairwise::<B>(flat, 0))
}

pub(in crate::decorator) fn float_prod_dim<B: Backend, P: Policy>(
    row: Row,
    x: Tensor<B>,
    dim: usize,
) -> Tensor<B> {
    let call = Call::new::<B, P>(row, &[&x]);
    let x = x.brought::<B>(call.target);
    if !call.mends || x.shape()[dim] == 0 || !is_differentiated::<B>(&x) {
        return call.wrap::<B>(B::float_prod_dim(x, dim));
    }
    call.wrap::<B>(pairwise::<B>(x, dim))
}

/// The first half times the second, until one element is left.
fn pairwise<B: Backend>(mut x: FloatTensor<B>, dim: usize) -> FloatTensor<B> {
    loop {
        let length = x.shape()[dim];
        if length == 1 {
            return x;
        }
        let half = length / 2;
        let part = |start: usize, end: usize| {
            let mut slices = vec![Slice::full(); x.rank()];
            slices[dim] = Slice::from(start..end);
            B::float_slice(x.clone(), &slices)
        };
        let product = B::float_mul(part(0, half), part(half, 2 * half));
        x = if length.is_multiple_of(2) {
            product
        } else {
            B::float_cat(vec![product, part(length - 1, length)], dim)
        };
    }
}
