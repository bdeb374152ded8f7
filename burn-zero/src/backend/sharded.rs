//! `Sharded` as a backend. In its backward pass gradients leave the graph for the gradient reducer,
//! and are replaced by this rank's shards, on the device or in host memory.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::sync::Arc;

use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, BackendTypes};
use burn_decorator::autodiff::TapeBackend;
use burn_decorator::gradient;
use burn_decorator::weight::{GradientWeight, take};

use super::leaves::{depth, forget_depth, leaves, node, part_of, reducers};
use super::placed::PlacedTensor;
use super::stream;
use super::tape;
use super::with_host::WithHost;
use crate::reduce::GradientReducer;

/// A backend whose gradients are reduced, or copied to the host, during backward:
/// `Sharded<Autodiff<Cuda>>`.
///
/// It passes every operation to the inner backend. It only hooks leaves that are parameters of an
/// [update over ranks](crate::ReduceOverRanks) of this thread that has several ranks or gradients
/// in host memory, or of an [`OffloadedAdamW`](crate::OffloadedAdamW). Put it directly outside of
/// `Autodiff`, and inside of autocast: `Autocast<Sharded<Autodiff<Cuda>>>`. Its inner backend, the
/// one of `valid()`, is [`WithHost<Cuda>`](crate::WithHost).
///
/// See [what happens to a gradient](crate#what-happens-to-a-gradient).
#[derive(Clone, Copy, Debug, Default)]
pub struct Sharded<A> {
    inner: PhantomData<A>,
}

impl<A: TapeBackend> BackendTypes for Sharded<A> {
    burn_decorator::forward_types!(A, float tensor: A::FloatTensorPrimitive);
}

#[deny(clippy::missing_trait_methods)]
impl<A: TapeBackend> Backend for Sharded<A> {
    burn_decorator::forward_device!(A, seed: stream::seed::<A>);
    burn_decorator::forward_dtypes!(A);

    fn name(device: &Self::Device) -> String {
        format!("sharded<{}>", A::name(device))
    }
}

/// The gradients of a backward pass of [`Sharded`].
///
/// Under stage 2 the gradient of a parameter is this rank's shard of the reduced gradient: a tensor
/// with as many dimensions as the parameter, all 1 but the last, which is the length of the shard.
/// A rank without elements of the parameter gets a single 0 (or NaN, if the gradient is non-finite
/// anywhere), so that all ranks have gradients of the same parameters.
///
/// With [`Memory::Host`](crate::Memory::Host) the shard is in host memory, as are the whole
/// gradients of stages 0 and 1, and those of an [`OffloadedAdamW`](crate::OffloadedAdamW) outside
/// of a [reduction](crate::ReduceOverRanks).
pub struct ShardedGradients<A: TapeBackend> {
    inner: A::Gradients,
    /// By node, of parameters whose gradients left or were replaced; `None` for one that has no
    /// gradient on any rank.
    left: HashMap<u64, Option<Gradient<A>>>,
    /// The factor by which the gradients in `inner` are still to be multiplied.
    weight: Option<FloatTensor<A::InnerBackend>>,
    /// The reducers that took part in the backward pass.
    reducers: Vec<Arc<GradientReducer>>,
}

type Inner<A> = WithHost<<A as AutodiffBackend>::InnerBackend>;
type Gradient<A> = FloatTensor<Inner<A>>;

#[deny(clippy::missing_trait_methods)]
impl<A: TapeBackend> AutodiffBackend for Sharded<A> {
    type InnerBackend = Inner<A>;
    type Gradients = ShardedGradients<A>;

    burn_decorator::forward_inner!(A);

    fn backward(loss: FloatTensor<Self>) -> Self::Gradients {
        let reducers = reducers();
        let device = A::float_device(&loss);
        let loss = match depth(&loss) {
            Some(_) if !reducers.is_empty() => {
                for reducer in &reducers {
                    begin(reducer);
                }
                tape::close(loss, reducers.clone())
            }
            // A loss that depends on no parameter is refused by the inner backend.
            _ => loss,
        };
        // Gradients of all ranks are added during backward: each rank multiplies its own by the
        // weight first.
        let weight = (!reducers.is_empty()).then(take::<GradientWeight<Gradient<A>>>);
        let weight = weight
            .flatten()
            .map(|weight| weight.0.up::<A::InnerBackend>());
        let backward = || gradient::backward(|| A::backward(loss));
        let inner = match &weight {
            Some(weight) => tape::weighted::<A::InnerBackend, _>(weight.clone(), backward),
            None => backward(),
        };
        let mut gradients = ShardedGradients {
            inner,
            left: HashMap::new(),
            weight,
            reducers,
        };
        forget_depth();
        for reducer in gradients.reducers.clone() {
            gradients.finish(&reducer, &device);
        }
        gradients
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        match grads.left.get(&node(tensor)) {
            Some(gradient) => gradient.clone(),
            None => {
                grads.note_stayed(tensor);
                let gradient = A::grad(tensor, &grads.inner);
                gradient.map(|gradient| grads.weigh(gradient).of_rank(part_of(tensor)))
            }
        }
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        match grads.left.get_mut(&node(tensor)) {
            Some(gradient) => gradient.take(),
            None => {
                grads.note_stayed(tensor);
                let gradient = A::grad_remove(tensor, &mut grads.inner);
                gradient.map(|gradient| grads.weigh(gradient).of_rank(part_of(tensor)))
            }
        }
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        A::grad_remove(tensor, &mut grads.inner);
        grads.left.insert(node(tensor), Some(grad));
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        PlacedTensor::Device(A::inner(tensor))
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        A::from_inner(tensor.read().up::<A::InnerBackend>())
    }
}

/// Begins the reducer's part of a backward pass. Parameters that no graph uses have no gradient:
/// their buckets do not wait for them.
fn begin(reducer: &Arc<GradientReducer>) {
    let leaves = leaves(reducer);
    // Backward runs the deepest operations first.
    let order = || {
        let used = leaves
            .iter()
            .filter_map(|leaf| Some((leaf.depth?, leaf.parameter)));
        let mut order: Vec<_> = used.collect();
        order.sort_unstable_by(|a, b| b.cmp(a));
        order.into_iter().map(|(_, parameter)| parameter).collect()
    };
    crate::error::raise(reducer.begin_backward(order));
    for leaf in leaves.iter().filter(|leaf| leaf.depth.is_none()) {
        if reducer.takes(leaf.parameter) {
            reducer.submit(leaf.parameter, None);
        }
    }
}

impl<A: TapeBackend> ShardedGradients<A> {
    /// Notes that the gradient of a leaf has not left the graph, as that of a parameter which was
    /// replaced since the last step: the step reduces it. Also where this rank has none, as another
    /// may.
    fn note_stayed(&self, leaf: &FloatTensor<Sharded<A>>) {
        let node = node(leaf);
        for reducer in &self.reducers {
            reducer.set_not_reduced(node);
        }
    }

    /// A gradient that did not leave the graph, multiplied by the weight, if any.
    fn weigh(&self, gradient: FloatTensor<A::InnerBackend>) -> Gradient<A> {
        PlacedTensor::Device(match &self.weight {
            Some(weight) => tape::times::<A::InnerBackend>(gradient, weight.clone()),
            None => gradient,
        })
    }

    /// Waits for the gradients that left: reduced ones, or local ones copied to the host.
    fn finish(&mut self, reducer: &Arc<GradientReducer>, device: &A::Device) {
        let mut all = crate::error::raise(reducer.finish());
        // None are present if the loss is of another model, or of one with newly loaded weights:
        // the step reduces those gradients.
        if reducer.reduces_in_backward() && all.iter().any(Option::is_some) {
            reducer.set_reduced();
        }
        for leaf in leaves(reducer) {
            let gradient = all[leaf.parameter].take().map(|it| {
                let placed = reducer.placed::<Inner<A>>(it.data, device);
                placed.of_rank(reducer.gradient_part())
            });
            self.left.insert(leaf.node, gradient);
        }
    }
}
