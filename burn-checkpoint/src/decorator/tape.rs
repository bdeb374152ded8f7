//! A handle as decorators above see it: its metadata, and autodiff's tape.

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, Shape, TensorMetadata};
use burn_decorator::autodiff::{AutodiffTensor, record};
use burn_decorator::tape::{self, Tape};

use super::Remat;
use crate::node::handle::Handle;
use crate::node::kind::Kind;
use crate::record::context;

impl<B: Backend, K: Kind<B>> TensorMetadata for Handle<B, K> {
    #[inline]
    fn dtype(&self) -> DType {
        match self {
            Self::Resident(tensor, _) => tensor.dtype(),
            Self::Managed(managed) => managed.node().meta.dtype,
        }
    }

    /// A scope also finds its results by this method: it reads the shape of each while it collects
    /// them.
    #[inline]
    fn shape(&self) -> Shape {
        match self {
            Self::Resident(tensor, _) if !context::is_collecting() => tensor.shape(),
            _ => self.shape_apart(),
        }
    }

    /// Code above also finds autodiff's tape by this method: see [`tape`].
    #[inline]
    fn rank(&self) -> usize {
        let rank = match self {
            Self::Resident(tensor, _) => tensor.rank(),
            Self::Managed(managed) => managed.node().meta.shape.num_dims(),
        };
        // Offered after the call of a decorator below, which may offer its own.
        tape::offer(tape::<B>);
        rank
    }

    burn_decorator::metadata_of_release!(Device<B>, Handle::device, Handle::can_mut);
}

/// The tape of autodiff over [`Remat`].
fn tape<B: Backend>() -> Tape<AutodiffTensor<Remat<B>>> {
    Tape::new(
        |tensor: &AutodiffTensor<Remat<B>>| tensor.is_tracked(),
        |loss, operand, gradient| {
            let result = loss.primitive.clone();
            record(Held, [&loss, &operand], gradient.primitive, result)
        },
    )
}

/// Its state is the loss's derivative with respect to the operand; multiplied by the loss's
/// gradient, it is added to the operand's.
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
