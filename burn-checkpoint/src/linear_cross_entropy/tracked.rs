//! Whether autodiff tracks a tensor.

use std::fmt::Debug;

use burn::tensor::backend::Backend;
use burn::tensor::{Tensor, TensorPrimitive};

/// Whether a gradient may be asked for: `false` only where there is no autodiff, or where it is sure that the tensor is a constant to it.
///
/// Burn tells this of leaves alone (`is_require_grad`), and a hidden state is no leaf. What autodiff knows is in the `Debug` text of its
/// tensor, below any decorator. A text that says nothing counts as tracked: then a gradient is computed in vain, and none is lost.
pub(super) fn is_tracked<B: Backend, const D: usize>(tensor: &Tensor<B, D>) -> bool {
    if !B::ad_enabled(&tensor.device()) {
        return false;
    }
    match tensor.clone().into_primitive() {
        TensorPrimitive::Float(tensor) => !is_constant(&tensor),
        TensorPrimitive::QFloat(_) => false,
    }
}

fn is_constant(tensor: &impl Debug) -> bool {
    const FIELD: &str = "requirement: ";
    let text = format!("{tensor:?}");
    // The last: what is in the tensor comes before autodiff's node.
    let requirement = text.rfind(FIELD).map(|at| &text[at + FIELD.len()..]);
    requirement.is_some_and(|requirement| requirement.starts_with("None"))
}

/// The tensor as a constant. `Tensor::detach` keeps what `require_grad` has set.
pub(super) fn untracked<B: Backend, const D: usize>(tensor: Tensor<B, D>) -> Tensor<B, D> {
    tensor.set_require_grad(false)
}
