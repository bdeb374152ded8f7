//! Operations on one tensor whose gradient follows from their result.

use core::fmt;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use burn_decorator::autodiff::AutodiffTensor;

/// Puts `operation` on the tape with its result, from which `gradient_of` makes the operand's
/// gradient, given the result's. The operand is not kept, so a backend may write the result in its
/// place; [`record`](burn_decorator::autodiff::record) only borrows it.
pub(crate) fn record_from_result<B: Backend>(
    operand: AutodiffTensor<B>,
    operation: impl FnOnce(FloatTensor<B>) -> FloatTensor<B>,
    gradient_of: impl FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B> + Send + 'static,
) -> AutodiffTensor<B> {
    // The count keeps the operand's node in the graph until its child is there.
    let AutodiffTensor {
        primitive,
        node,
        rc: _count,
    } = operand;
    let result = operation(primitive);
    let prepared = FromResult(gradient_of).prepare::<NoCheckpointing>([node]);
    match prepared.compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(result.clone(), result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    }
}

struct FromResult<F>(F);

impl<F> fmt::Debug for FromResult<F> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("FromResult")
    }
}

impl<B, F> Backward<B, 1> for FromResult<F>
where
    B: Backend,
    F: FnOnce(FloatTensor<B>, FloatTensor<B>) -> FloatTensor<B> + Send + 'static,
{
    type State = FloatTensor<B>;

    fn backward(self, ops: Ops<Self::State, 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let result = ops.state;
        unary::<B, _>(ops.parents, ops.node, gradients, |gradient| {
            (self.0)(result, gradient)
        });
    }
}
