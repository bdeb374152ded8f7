//! Hooks on the leaves of Burn's autodiff graph.
//!
//! A custom operation on a leaf alone would have depth 1 and run last in backward, whatever uses the leaf. A hook
//! therefore has a second parent, an untracked tensor with the depth of the graph when the leaf was used: Burn runs the tape by
//! depth, so the hook runs directly after all later operations.

use std::sync::Arc;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::{CheckpointStrategy, NoCheckpointing};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, Shape, TensorMetadata};

use super::attached::{Reducers, Use, leaves};
use crate::host::HostRead;

/// An autodiff backend whose leaves can be hooked: Burn's `Autodiff`.
pub trait Tape: AutodiffBackend + sealed::Hooks {}

impl<B: Backend, C: CheckpointStrategy> Tape for Autodiff<B, C> {}

pub(crate) mod sealed {
    use super::*;

    pub trait Hooks: AutodiffBackend {
        /// The depth of a tensor in its graph; `None` if it is not part of one.
        fn depth(tensor: &FloatTensor<Self>) -> Option<usize>;

        /// The number of a tensor's node.
        fn node(tensor: &FloatTensor<Self>) -> u64;

        /// The leaf, for one use at `depth`.
        fn hook(leaf: FloatTensor<Self>, depth: usize, by: Arc<Use>) -> FloatTensor<Self>;

        /// The loss, with a last operation on the tape that submits the remaining gradients.
        fn close(loss: FloatTensor<Self>, reducers: Reducers) -> FloatTensor<Self>;
    }

    impl<B: Backend, C: CheckpointStrategy> Hooks for Autodiff<B, C> {
        fn depth(tensor: &FloatTensor<Self>) -> Option<usize> {
            (!tensor.node.requirement.is_none()).then_some(tensor.node.order)
        }

        fn node(tensor: &FloatTensor<Self>) -> u64 {
            tensor.node.id.value
        }

        fn hook(leaf: FloatTensor<Self>, depth: usize, by: Arc<Use>) -> FloatTensor<Self> {
            let mut anchor = Self::from_inner(leaf.primitive.clone());
            Arc::get_mut(&mut anchor.node)
                .expect("a tensor that was just made has one owner")
                .order = depth;
            let nodes = [leaf.node.clone(), anchor.node];
            let hook = Hook { by };
            Backward::<B, 2>::prepare::<NoCheckpointing>(hook, nodes)
                .compute_bound()
                .stateless(leaf.primitive)
        }

        fn close(loss: FloatTensor<Self>, reducers: Reducers) -> FloatTensor<Self> {
            let device = B::float_device(&loss.primitive);
            let dtype = loss.primitive.dtype().into();
            let nothing = B::float_zeros(Shape::from([1]), &device, dtype);
            let leaf = Self::from_inner(nothing.clone()).require_grad();
            let last = Backward::<B, 1>::prepare::<NoCheckpointing>(Last { reducers }, [leaf.node])
                .compute_bound()
                .stateless(nothing.clone());
            Backward::<B, 2>::prepare::<NoCheckpointing>(First, [loss.node, last.node])
                .compute_bound()
                .stateless(loss.primitive)
        }
    }
}

/// A tensor with the node of a leaf, as the key for looking up its gradient.
fn leaf<B: Backend>(node: u64, like: FloatTensor<B>) -> FloatTensor<Autodiff<B>> {
    let mut leaf = Autodiff::<B>::from_inner(like);
    Arc::get_mut(&mut leaf.node)
        .expect("a tensor that was just made has one owner")
        .id = NodeId { value: node };
    leaf
}

/// The end of one use of a parameter: its gradient is complete when no other use is left.
#[derive(Debug)]
struct Hook {
    by: Arc<Use>,
}

impl<B: Backend> Backward<B, 2> for Hook {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let [Some(node), _] = ops.parents else {
            return;
        };
        let node = node.id;
        match Arc::into_inner(self.by) {
            Some(last) if last.reducer.takes(last.parameter) => {
                let leaf = leaf::<B>(node.value, gradient.clone());
                let gradient = match gradients.remove(&leaf) {
                    Some(others) => B::float_add(gradient, others),
                    None => gradient,
                };
                drop(leaf);
                let read = HostRead::start::<B>(gradient);
                last.reducer.submit(last.parameter, Some(read));
            }
            _ => gradients.register::<B>(node, gradient),
        }
    }
}

/// The root of the tape.
#[derive(Debug)]
struct First;

impl<B: Backend> Backward<B, 2> for First {
    type State = ();

    fn backward(self, ops: Ops<(), 2>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let gradient = gradients.consume::<B>(&ops.node);
        let [loss, last] = ops.parents;
        if let Some(last) = last {
            let device = B::float_device(&gradient);
            let nothing = B::float_zeros(Shape::from([1]), &device, gradient.dtype().into());
            gradients.register::<B>(last.id, nothing);
        }
        if let Some(loss) = loss {
            gradients.register::<B>(loss.id, gradient);
        }
    }
}

/// The last operation of the tape, less deep than every hook: submits parameters that no hook did, because they have no gradient
/// or because another live graph uses them too.
///
/// It runs inside the backward pass, not after it: the pass ends by locking the graphs of all threads, one of which may wait for this
/// rank.
#[derive(Debug)]
struct Last {
    reducers: Reducers,
}

impl<B: Backend> Backward<B, 1> for Last {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let like = gradients.consume::<B>(&ops.node);
        for reducer in &self.reducers.0 {
            for (parameter, node) in leaves(reducer) {
                if reducer.takes(parameter) {
                    let gradient = gradients.remove(&leaf::<B>(node, like.clone()));
                    reducer.submit(parameter, gradient.map(HostRead::start::<B>));
                }
            }
        }
    }
}
