//! The product of a column and a row. It adds nothing up, so a low type makes it no faster and only
//! less exact: positions times frequencies (rotary embeddings), an elimination's updates
//! (`linalg::lu`, `linalg::det`).

use burn_backend::{Backend, TensorMetadata};

use super::{Call, Tensor};
use crate::cast::Cast;
use crate::decorator::ops::Row;
use crate::policy::Policy;

pub(in crate::decorator) fn float_matmul<B: Backend, P: Policy>(
    row: Row,
    lhs: Tensor<B>,
    rhs: Tensor<B>,
) -> Tensor<B> {
    let row = if is_outer::<B>(&lhs) {
        row.with_class(Cast::Promote)
    } else {
        row
    };
    let call = Call::new::<B, P>(row, &[&lhs, &rhs]);
    let (lhs, rhs) = (lhs.brought::<B>(call.target), rhs.brought::<B>(call.target));
    call.wrap::<B>(B::float_matmul(lhs, rhs))
}

/// Whether the left operand is one column: what is multiplied has an inner dimension of 1.
fn is_outer<B: Backend>(lhs: &Tensor<B>) -> bool {
    let shape = lhs.tensor.shape();
    shape.last() == Some(&1)
}
