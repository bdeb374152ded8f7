//! What laws that need no model begin with, and what they compare.

use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Tensor, TensorData};

/// `[8, 8]`, the same each time.
pub fn input<B: Backend>() -> Tensor<B, 2> {
    let data: Vec<f32> = (0..64).map(|x| (x as f32 * 0.37).sin()).collect();
    Tensor::from_data(TensorData::new(data, [8, 8]), &Default::default())
}

/// The bits of a gradient.
pub type Bits = Vec<u8>;

/// Those of `x`.
pub fn gradient_bits<B: AutodiffBackend, const D: usize>(
    x: &Tensor<B, D>,
    grads: &B::Gradients,
) -> Bits {
    let grad = x.grad(grads).expect("a gradient");
    grad.into_data().bytes.to_vec()
}
