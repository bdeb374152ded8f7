//! Hooks on the leaves of Burn's autodiff graph.
//!
//! A custom operation on a leaf alone would have depth 1 and run last in backward, whatever uses
//! the leaf. A hook therefore has a second parent, an untracked tensor with the depth of the graph
//! when the leaf was used: Burn runs the tape by depth, so the hook runs directly after all later
//! operations.

use std::sync::Arc;

use burn_autodiff::checkpoint::base::Checkpointer;
use burn_autodiff::checkpoint::strategy::NoCheckpointing;
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops};
use burn_autodiff::{Autodiff, NodeId};
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, Shape, TensorMetadata};
use burn_decorator::HostRead;
use burn_decorator::autodiff::AutodiffTensor;
use burn_decorator::carried::{carry, with};

use super::leaves::{Depth, OwnLeaf, Use, begin_use, leaves};
use crate::reduce::GradientReducer;

/// The operand of a recorded operation, hooked if it is a registered leaf.
#[inline]
pub(super) fn enter<B: Backend>(operand: AutodiffTensor<B>, depth: Depth) -> AutodiffTensor<B> {
    match begin_use(&operand, depth) {
        // The hook must be deeper than `Last`, the last operation of the tape, which has depth 1.
        Some((by, depth)) => hook(operand, depth.max(1), by),
        None => operand,
    }
}

/// Hooks one use of a leaf at `depth`: the result is an identity operation on the leaf.
fn hook<B: Backend>(leaf: AutodiffTensor<B>, depth: usize, by: Arc<Use>) -> AutodiffTensor<B> {
    let mut anchor = Autodiff::<B>::from_inner(leaf.primitive.clone());
    Arc::get_mut(&mut anchor.node)
        .expect("a tensor that was just made has one owner")
        .order = depth;
    let nodes = [leaf.node.clone(), anchor.node];
    Backward::<B, 2>::prepare::<NoCheckpointing>(Hook { by }, nodes)
        .compute_bound()
        .stateless(leaf.primitive)
}

/// The loss, with a last operation on the tape that submits the remaining gradients.
pub(super) fn close<B: Backend>(
    loss: AutodiffTensor<B>,
    reducers: Vec<Arc<GradientReducer>>,
) -> AutodiffTensor<B> {
    let device = B::float_device(&loss.primitive);
    let dtype = loss.primitive.dtype().into();
    let nothing = B::float_zeros(Shape::from([1]), &device, dtype);
    let leaf = Autodiff::<B>::from_inner(nothing.clone()).require_grad();
    let last = Backward::<B, 1>::prepare::<NoCheckpointing>(Last { reducers }, [leaf.node])
        .compute_bound()
        .stateless(nothing);
    Backward::<B, 2>::prepare::<NoCheckpointing>(First, [loss.node, last.node])
        .compute_bound()
        .stateless(loss.primitive)
}

/// A tensor with the node of a leaf, as the key for looking up its gradient.
fn leaf<B: Backend>(node: u64, like: FloatTensor<B>) -> FloatTensor<Autodiff<B>> {
    let mut leaf = Autodiff::<B>::from_inner(like);
    Arc::get_mut(&mut leaf.node)
        .expect("a tensor that was just made has one owner")
        .id = NodeId { value: node };
    leaf
}

/// The factor of the gradients that leave the graph in a backward pass: a tensor of one f32
/// element.
struct LeavingWeight<T>(T);

/// Runs a backward pass whose gradients are multiplied by `weight` when they leave the graph.
pub(super) fn weighted<B: Backend, R>(weight: FloatTensor<B>, backward: impl FnOnce() -> R) -> R {
    carry(LeavingWeight(weight), backward).0
}

/// A gradient times a tensor of one f32 element.
pub(super) fn times<B: Backend>(
    gradient: FloatTensor<B>,
    weight: FloatTensor<B>,
) -> FloatTensor<B> {
    let weight = B::float_cast(weight, gradient.dtype().into());
    let weight = B::float_reshape(weight, Shape::from(vec![1; gradient.rank()]));
    B::float_mul(gradient, weight)
}

/// Starts to copy a gradient that leaves the graph to the host, multiplied by the weight of the
/// backward pass, if any.
fn read<B: Backend>(gradient: FloatTensor<B>) -> HostRead {
    let weight = with(|weight: &mut LeavingWeight<FloatTensor<B>>| weight.0.clone());
    HostRead::start::<B>(match weight {
        Some(weight) => times::<B>(gradient, weight),
        None => gradient,
    })
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
        let last = Arc::into_inner(self.by);
        let last = last.and_then(|last| Some((last.reducer.upgrade()?, last.parameter)));
        match last {
            Some((reducer, parameter)) if reducer.takes(parameter) => {
                let leaf = leaf::<B>(node.value, gradient.clone());
                let gradient = match gradients.remove(&leaf) {
                    Some(others) => B::float_add(gradient, others),
                    None => gradient,
                };
                drop(leaf);
                reducer.submit(parameter, Some(read::<B>(gradient)));
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

/// The last operation of the tape, less deep than every hook: submits parameters that no hook did,
/// because they have no gradient or because another live graph uses them too.
///
/// It runs inside the backward pass, not after it: the pass ends by locking the graphs of all
/// threads, one of which may wait for this rank.
#[derive(Debug)]
struct Last {
    reducers: Vec<Arc<GradientReducer>>,
}

impl<B: Backend> Backward<B, 1> for Last {
    type State = ();

    fn backward(self, ops: Ops<(), 1>, gradients: &mut Gradients, _: &mut Checkpointer) {
        let like = gradients.consume::<B>(&ops.node);
        for reducer in &self.reducers {
            for OwnLeaf {
                parameter, node, ..
            } in leaves(reducer)
            {
                if reducer.takes(parameter) {
                    let gradient = gradients.remove(&leaf::<B>(node, like.clone()));
                    reducer.submit(parameter, gradient.map(read::<B>));
                }
            }
        }
    }
}
