//! Sums over rows.

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, Shape, TensorMetadata};

/// The sum over all dimensions but the last.
pub(crate) fn sum_of_rows<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let shape = tensor.shape();
    let width = shape[shape.num_dims() - 1];
    let rows = shape.num_elements() / width.max(1);
    let matrix = B::float_reshape(tensor, Shape::new([rows, width]));
    B::float_reshape(B::float_sum_dim(matrix, 0), Shape::new([width]))
}
