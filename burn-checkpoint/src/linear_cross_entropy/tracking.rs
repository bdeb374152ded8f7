//! Which operands autodiff tracks, and how it gets their gradients.

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_decorator::tape::{self, Tape};

/// How the autodiff in a backend can be reached.
pub(super) enum Tracking<B: Backend> {
    /// There is no autodiff.
    None,
    /// By the tape that decorators offer: [`Remat`](crate::Remat) is below autodiff.
    Tape(Tape<FloatTensor<B>>),
    /// Only by Burn's operations, which report only of leaves whether they are tracked, so every operand counts as tracked: a gradient may
    /// be computed in vain, but none is lost.
    Operations,
}

impl<B: Backend> Tracking<B> {
    pub fn of(tensor: &Tensor<B, 2>) -> Self {
        if !B::ad_enabled(&tensor.device()) {
            return Self::None;
        }
        let TensorPrimitive::Float(tensor) = tensor.clone().into_primitive() else {
            return Self::Operations;
        };
        tape::find(|| tensor.rank()).map_or(Self::Operations, Self::Tape)
    }

    pub fn is_tracked<const D: usize>(&self, tensor: &Tensor<B, D>) -> bool {
        match (self, tensor.clone().into_primitive()) {
            (Self::None, _) | (_, TensorPrimitive::QFloat(_)) => false,
            (Self::Tape(tape), TensorPrimitive::Float(tensor)) => tape.is_tracked(&tensor),
            (Self::Operations, _) => true,
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
        if let Self::Tape(tape) = self {
            let (loss, gradient) = (
                loss.into_primitive().tensor(),
                gradient.into_primitive().tensor(),
            );
            // This permutation changes nothing, but decorators see the operand used. `Tensor::permute` would skip it.
            let axes: Vec<usize> = (0..D).collect();
            let operand = B::float_permute(operand.into_primitive().tensor(), &axes);
            let loss = tape.attach(loss, operand, gradient);
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
