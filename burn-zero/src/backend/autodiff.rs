//! The backward pass: gradients leave while it goes on, and come back as this rank's pieces, on the device or in host memory.

use std::collections::{BTreeSet, HashMap};

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{AutodiffBackend, FloatDType, Shape, TensorData};

use super::attached::{Attachment, attachments, forget_depth};
use super::sharded::Sharded;
use super::tape::Tape;
use super::with_host::{PlacedTensor, WithHost, on_host};
use crate::Memory;
use crate::host::{HostRead, is_finite};
use crate::reduce::{Arriving, Parameter, Reduced, Timing};

/// The gradients of a backward pass of [`Sharded`].
///
/// Whoever reads that of a parameter gets, under stage 2, this rank's piece of the reduced gradient: a tensor of the parameter's
/// rank whose last dimension is the piece and whose others are 1. A rank that holds no element of the parameter gets a single 0
/// (or NaN, if the gradient is non-finite anywhere), so that all ranks meet the same parameters.
///
/// With [`Memory::Host`] it is in host memory, as are the whole gradients of stages 0 and 1 and of an optimizer on the host alone.
pub struct ShardedGradients<A: Tape> {
    inner: A::Gradients,
    /// By node, of parameters whose gradients left; `None` for one that has no gradient on any rank.
    pieces: HashMap<u64, Option<Gradient<A>>>,
}

type Inner<A> = WithHost<<A as AutodiffBackend>::InnerBackend>;
type Gradient<A> = FloatTensor<Inner<A>>;

#[deny(clippy::missing_trait_methods)]
impl<A: Tape> AutodiffBackend for Sharded<A> {
    type InnerBackend = Inner<A>;
    type Gradients = ShardedGradients<A>;

    fn backward(loss: FloatTensor<Self>) -> Self::Gradients {
        let attachments = attachments();
        let device = A::float_device(&loss);
        let loss = begin::<A>(loss, &attachments);
        let mut gradients = ShardedGradients {
            inner: A::backward(loss),
            pieces: HashMap::new(),
        };
        forget_depth();
        for attachment in &attachments {
            gradients.finish(attachment, &device);
        }
        gradients
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        match grads.pieces.get(&A::node(tensor)) {
            Some(piece) => piece.clone(),
            None => A::grad(tensor, &grads.inner).map(PlacedTensor::Device),
        }
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        match grads.pieces.get_mut(&A::node(tensor)) {
            Some(piece) => piece.take(),
            None => A::grad_remove(tensor, &mut grads.inner).map(PlacedTensor::Device),
        }
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        match grads.pieces.get_mut(&A::node(tensor)) {
            Some(piece) => *piece = Some(grad),
            None => A::grad_replace(tensor, &mut grads.inner, grad.up::<A::InnerBackend>()),
        }
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        PlacedTensor::Device(A::inner(tensor))
    }

    fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Self::InnerBackend> {
        A::int_inner(tensor)
    }

    fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Self::InnerBackend> {
        A::bool_inner(tensor)
    }

    fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self::InnerBackend> {
        A::q_inner(tensor)
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        A::from_inner(tensor.up::<A::InnerBackend>())
    }

    fn int_from_inner(tensor: IntTensor<Self::InnerBackend>) -> IntTensor<Self> {
        A::int_from_inner(tensor)
    }

    fn bool_from_inner(tensor: BoolTensor<Self::InnerBackend>) -> BoolTensor<Self> {
        A::bool_from_inner(tensor)
    }

    fn q_from_inner(tensor: QuantizedTensor<Self::InnerBackend>) -> QuantizedTensor<Self> {
        A::q_from_inner(tensor)
    }
}

/// Starts the passes of the exchanges that take gradients during backward.
fn begin<A: Tape>(loss: FloatTensor<A>, attachments: &[Attachment]) -> FloatTensor<A> {
    let taking: Vec<_> = attachments
        .iter()
        .filter(|attachment| attachment.reducer().takes_in_backward())
        .cloned()
        .collect();
    // A loss that depends on no parameter is the inner backend's to refuse.
    if taking.is_empty() || A::depth(&loss).is_none() {
        return loss;
    }
    for attachment in &taking {
        let order = || attachment.arrival_order();
        crate::raise(attachment.reducer().begin_backward(order));
        attachment.submit_unused();
    }
    A::close(loss, taking)
}

impl<A: Tape> ShardedGradients<A> {
    fn finish(&mut self, attachment: &Attachment, device: &A::Device) {
        let reducer = attachment.reducer();
        match (reducer.timing(), reducer.memory()) {
            (Timing::DuringBackward, memory) => {
                let mut reduced = crate::raise(reducer.finish());
                // A model with other leaves, such as one whose weights were loaded, is left to the step.
                if reduced.iter().any(Reduced::is_present) {
                    reducer.note(Arriving::Reduced);
                } else {
                    reducer.note(Arriving::Local);
                }
                for (parameter, node) in attachment.leaves() {
                    let reduced = core::mem::take(&mut reduced[parameter]);
                    let piece = reduced.into_piece(&reducer.layout().parameters()[parameter]);
                    let piece = piece.map(|data| match memory {
                        Memory::Device => Inner::<A>::float_from_data(data, device),
                        Memory::Host => on_host::<Inner<A>>(data, device),
                    });
                    self.pieces.insert(node, piece);
                }
            }
            (Timing::AtTheStep, Memory::Device) => self.agree(attachment, device),
            (Timing::AtTheStep, Memory::Host) => self.land(attachment, device),
        }
    }

    /// The gradients of this rank alone that are on the host by now. What is non-finite on any rank is NaN on this one.
    fn land(&mut self, attachment: &Attachment, device: &A::Device) {
        let reducer = attachment.reducer();
        let mut landed = reducer.finish_landing();
        let culprits = match reducer.group().world_size() {
            1 => BTreeSet::new(),
            _ => {
                let own = landed.iter().enumerate();
                let own =
                    own.filter(|(_, data)| data.as_ref().is_some_and(|data| !is_finite(data)));
                let own = own.map(|(parameter, _)| parameter).collect();
                crate::raise(reducer.agree_on_non_finite(&own))
            }
        };
        for (parameter, node) in attachment.leaves() {
            let Parameter { shape, dtype, .. } = &reducer.layout().parameters()[parameter];
            let data = match landed[parameter].take() {
                _ if culprits.contains(&parameter) => {
                    let nan = vec![f32::NAN; shape.iter().product()];
                    Some(TensorData::new(nan, shape.clone()).convert_dtype(*dtype))
                }
                data => data,
            };
            let gradient = data.map(|data| on_host::<Inner<A>>(data, device));
            self.pieces.insert(node, gradient);
        }
    }

    /// Makes gradients that are non-finite on any rank NaN on this one, so that whoever skips a step does so everywhere.
    fn agree(&mut self, attachment: &Attachment, device: &A::Device) {
        let reducer = attachment.reducer();
        let leaves = attachment.leaves();
        let culprits = self.non_finite(&leaves, device);
        let agreed = crate::raise(reducer.agree_on_non_finite(&culprits));
        for (parameter, node) in leaves {
            if agreed.contains(&parameter) && !culprits.contains(&parameter) {
                let Parameter { shape, dtype, .. } = &reducer.layout().parameters()[parameter];
                let shape = Shape::from(shape.clone());
                let poison =
                    A::InnerBackend::float_full(shape, f32::NAN.into(), device, (*dtype).into());
                A::replace_gradient_of(node, &mut self.inner, poison);
            }
        }
    }

    /// The parameters with a non-finite gradient on this rank. One host read if there are none: a sum that is finite has only
    /// finite terms.
    fn non_finite(&self, leaves: &[(usize, u64)], device: &A::Device) -> BTreeSet<usize> {
        let like = A::InnerBackend::float_zeros(Shape::from([1]), device, FloatDType::F32);
        let gradient = |node| A::gradient_of(node, &like, &self.inner);
        let (parameters, sums): (Vec<_>, Vec<_>) = leaves
            .iter()
            .filter_map(|&(parameter, node)| {
                let sum = A::InnerBackend::float_sum(gradient(node)?);
                let sum = A::InnerBackend::float_cast(sum, FloatDType::F32);
                Some(((parameter, node), sum))
            })
            .unzip();
        if sums.is_empty() {
            return BTreeSet::new();
        }
        let sums = HostRead::start::<A::InnerBackend>(A::InnerBackend::float_cat(sums, 0)).wait();
        let suspects = parameters.into_iter().zip(sums);
        suspects
            .filter(|(_, sum)| !sum.is_finite())
            .filter(|((_, node), _)| {
                gradient(*node).is_some_and(|gradient| {
                    let values = HostRead::start::<A::InnerBackend>(gradient).wait();
                    values.iter().any(|value| !value.is_finite())
                })
            })
            .map(|((parameter, _), _)| parameter)
            .collect()
    }
}
