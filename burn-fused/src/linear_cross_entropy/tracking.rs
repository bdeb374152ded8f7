//! Which operands autodiff tracks, and how it gets their gradients.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_decorator::tape::{self, Tape};

/// The tape that decorators offer where [`Remat`](burn_checkpoint::Remat) is below autodiff.
/// Without one autodiff is reached only by Burn's operations, which report only of leaves whether
/// they are tracked, so every operand counts as tracked: a gradient may be computed in vain, but
/// none is lost.
pub(super) struct Tracking<B: Backend>(Option<Tape<FloatTensor<B>>>);

impl<B: Backend> Tracking<B> {
    pub fn of(tensor: &Tensor<B, 2>) -> Self {
        match tensor.clone().into_primitive() {
            TensorPrimitive::Float(tensor) => Self(tape::find(|| tensor.rank())),
            TensorPrimitive::QFloat(_) => Self(None),
        }
    }

    pub fn is_tracked<const D: usize>(&self, tensor: &Tensor<B, D>) -> bool {
        match (&self.0, tensor.clone().into_primitive()) {
            (_, TensorPrimitive::QFloat(_)) => false,
            (Some(tape), TensorPrimitive::Float(tensor)) => tape.is_tracked(&tensor),
            (None, _) => B::ad_enabled(&tensor.device()),
        }
    }

    /// `loss`, whose gradient with respect to `operand` is `gradient` on top of what it has.
    pub fn attach<const D: usize>(
        &self,
        loss: Tensor<B, 1>,
        operand: Tensor<B, D>,
        gradient: Tensor<B, D>,
    ) -> Tensor<B, 1> {
        let operand = operand.cast(gradient.dtype());
        if let Some(tape) = &self.0 {
            // This permutation changes nothing, but decorators see the operand used.
            // `Tensor::permute` would skip it.
            let axes = Vec::from_iter(0..D);
            let operand = B::float_permute(operand.into_primitive().tensor(), &axes);
            let gradient = gradient.into_primitive().tensor();
            let loss = tape.attach(loss.into_primitive().tensor(), operand, gradient);
            return Tensor::from_primitive(TensorPrimitive::Float(loss));
        }
        // A term of value 0; its backward multiplies the gradient into a tensor of the same size.
        let product = (operand * gradient).sum();
        loss + (product.clone() - untracked(product))
    }
}

/// The tensor as a constant. `Tensor::detach` keeps what `require_grad` has set.
pub(super) fn untracked<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.set_require_grad(false)
}
