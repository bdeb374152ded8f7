//! What an update differentiates.

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::{Tensor, backend::AutodiffBackend};

/// A loss that [`Update::backward`](crate::Update::backward) differentiates: a tensor, or
/// burn-accum's `Counted`, which passes the number of its items on with the gradients.
pub trait Loss<B: AutodiffBackend> {
    /// The gradients of the loss by the parameters of `model`.
    fn backward<M: AutodiffModule<B>>(self, model: &M) -> GradientsParams;
}

impl<B: AutodiffBackend, const D: usize> Loss<B> for Tensor<B, D> {
    fn backward<M: AutodiffModule<B>>(self, model: &M) -> GradientsParams {
        GradientsParams::from_grads(Tensor::backward(&self), model)
    }
}
