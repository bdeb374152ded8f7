//! A gradient that is held from the forward pass on, as an operation on autodiff's tape.

use burn::backend::Autodiff;
use burn::backend::autodiff::checkpoint::base::Checkpointer;
use burn::backend::autodiff::checkpoint::strategy::NoCheckpointing;
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops, OpsKind};
use burn::tensor::backend::Backend;
use burn::tensor::{Shape, Tensor, TensorPrimitive};
use burn_backend::TensorMetadata;
use burn_backend::tensor::FloatTensor;
use burn_decorator::tape::{self, Tape};

use crate::Remat;

/// Autodiff below a backend, as far as it can be reached.
pub(super) enum Tracking<B: Backend> {
    /// There is no autodiff.
    None,
    /// By the seam of decorators: [`Remat`] is below autodiff.
    Tape(Tape<FloatTensor<B>>),
    /// Only by Burn's operations, which tell of leaves alone whether they are tracked: everything counts as tracked. A gradient may
    /// be computed in vain, and none is lost.
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
            let [loss, operand, gradient] = [
                loss.into_primitive(),
                operand.into_primitive(),
                gradient.into_primitive(),
            ]
            .map(TensorPrimitive::tensor);
            // An operation, although it changes nothing: decorators see the operand used. Tensor's own leaves it out.
            let axes: Vec<usize> = (0..D).collect();
            let loss = tape.attach(loss, B::float_permute(operand, &axes), gradient);
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

/// The tape of autodiff over [`Remat`].
pub(crate) fn tape<B: Backend>() -> Tape<FloatTensor<Autodiff<Remat<B>>>> {
    Tape::new(
        |tensor: &FloatTensor<Autodiff<Remat<B>>>| tensor.is_tracked(),
        |loss, operand, gradient| {
            let nodes = [loss.node, operand.node];
            let prepared = Backward::<Remat<B>, 2>::prepare::<NoCheckpointing>(Held, nodes);
            match prepared.compute_bound().stateful() {
                OpsKind::Tracked(prepared) => prepared.finish(gradient.primitive, loss.primitive),
                OpsKind::UnTracked(prepared) => prepared.finish(loss.primitive),
            }
        },
    )
}

/// Adds the gradient that is its state, times that of the loss, to the operand's.
#[derive(Debug)]
struct Held;

impl<B: Backend> Backward<B, 2> for Held {
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let of_loss = gradients.consume::<B>(&ops.node);
        let [loss, operand] = ops.parents;
        if let Some(operand) = operand {
            let scalar = Shape::from(vec![1; ops.state.rank()]);
            let factor = B::float_reshape(of_loss.clone(), scalar);
            gradients.register::<B>(operand.id, B::float_mul(ops.state, factor));
        }
        if let Some(loss) = loss {
            gradients.register::<B>(loss.id, of_loss);
        }
    }
}
