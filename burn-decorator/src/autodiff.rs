//! Operations of one's own on the tape of Burn's `Autodiff`.
//!
//! ```
//! use burn_autodiff::checkpoint::base::Checkpointer;
//! use burn_autodiff::grads::Gradients;
//! use burn_autodiff::ops::{Backward, Ops};
//! use burn_autodiff::Autodiff;
//! use burn_backend::ops::FloatTensorOps;
//! use burn_backend::{AutodiffBackend, Backend, TensorData};
//! use burn_decorator::autodiff::{AutodiffTensor, record};
//! use burn_flex::Flex;
//!
//! /// The identity, whose gradient is twice that of its result.
//! #[derive(Debug)]
//! struct Doubled;
//!
//! impl<B: Backend> Backward<B, 1> for Doubled {
//!     type State = ();
//!
//!     fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
//!         let gradient = gradients.consume::<B>(&ops.node);
//!         if let [Some(operand)] = ops.parents {
//!             let doubled = B::float_mul_scalar(gradient, 2.0.into());
//!             gradients.register::<B>(operand.id, doubled);
//!         }
//!     }
//! }
//!
//! let x: AutodiffTensor<Flex> = Autodiff::<Flex>::float_from_data(TensorData::from([3.0f32]), &Default::default());
//! let x = Autodiff::<Flex>::float_set_require_grad(x, true);
//! let y = record::<Flex, _, 1>(Doubled, [&x], (), x.primitive.clone());
//! let gradients = Autodiff::<Flex>::backward(y);
//! let gradient = Autodiff::<Flex>::grad(&x, &gradients).unwrap();
//! let data = burn_backend::read_sync(Flex::float_into_data(gradient)).unwrap();
//! assert_eq!(data.to_vec::<f32>().unwrap(), [2.0]);
//! ```

use burn_autodiff::Autodiff;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::ops::{Backward, OpsKind};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, BackendTypes};

/// A tensor of Burn's `Autodiff`, with its node in the graph.
pub type AutodiffTensor<B> = FloatTensor<Autodiff<B>>;

/// A backend with the tensors of Burn's `Autodiff`: `Autodiff` itself, and decorators directly
/// around it that put operations of their own on its tape.
pub trait TapeBackend:
    AutodiffBackend
    + BackendTypes<FloatTensorPrimitive = AutodiffTensor<<Self as AutodiffBackend>::InnerBackend>>
{
}

impl<B: Backend, C: CheckpointStrategy> TapeBackend for Autodiff<B, C> {}

/// Puts `result`, an operation on `operands`, on the tape with what its backward needs. Where no
/// operand is tracked, `state` is dropped and the result is not tracked either.
///
/// # Cost
///
/// One node of the graph, where an operand is tracked.
pub fn record<B: Backend, O: Backward<B, N>, const N: usize>(
    operation: O,
    operands: [&AutodiffTensor<B>; N],
    state: O::State,
    result: FloatTensor<B>,
) -> AutodiffTensor<B> {
    let nodes = operands.map(|operand| operand.node.clone());
    let prepared = operation.prepare::<NoCheckpointing>(nodes).compute_bound();
    match prepared.stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(state, result),
        OpsKind::UnTracked(prepared) => prepared.finish(result),
    }
}
