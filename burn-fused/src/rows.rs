//! Rows of a tensor: what lies along its last dimension.

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

/// A vector as the one row of a tensor with so many dimensions: `[1, .., features]`.
pub(crate) fn as_row<B: Backend>(vector: FloatTensor<B>, dimensions: usize) -> FloatTensor<B> {
    let mut row = vec![1; dimensions - 1];
    row.extend(vector.shape().iter());
    B::float_reshape(vector, Shape::from(row))
}

/// Rows over their root mean squares.
pub(crate) struct Normalized<B: Backend> {
    /// `[.., features]`
    pub normalized: FloatTensor<B>,
    /// `[.., 1]`: one over the root mean square.
    pub inverse: FloatTensor<B>,
}

/// Divides each row by `sqrt(mean(row²) + epsilon)`.
pub(crate) fn normalize<B: Backend>(x: FloatTensor<B>, epsilon: f64) -> Normalized<B> {
    let square = B::float_mul(x.clone(), x.clone());
    let mean = B::float_mean_dim(square, x.rank() - 1);
    let root = B::float_sqrt(B::float_add_scalar(mean, epsilon.into()));
    let inverse = B::float_recip(root);
    Normalized {
        normalized: B::float_mul(x, inverse.clone()),
        inverse,
    }
}
