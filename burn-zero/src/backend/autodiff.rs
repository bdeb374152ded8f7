//! The backward pass: gradients leave while it goes on, and come back as this rank's pieces.

use std::collections::{BTreeSet, HashMap};

use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{AutodiffBackend, FloatDType, Shape};

use super::attached::{Attachment, attachments, forget_depth};
use super::sharded::Sharded;
use super::tape::Tape;
use crate::host::HostRead;
use crate::reduce::{Arriving, Parameter, Reduced, Timing};

/// The gradients of a backward pass of [`Sharded`].
///
/// Whoever reads that of a parameter gets, under stage 2, this rank's piece of the reduced gradient: a tensor of the parameter's
/// rank whose last dimension is the piece and whose others are 1. A rank that holds no element of the parameter gets a single 0
/// (or NaN, if the gradient is non-finite anywhere), so that all ranks meet the same parameters.
pub struct ShardedGradients<A: Tape> {
    inner: A::Gradients,
    /// By node; `None` for a parameter that has no gradient on any rank.
    pieces: HashMap<u64, Option<FloatTensor<A::InnerBackend>>>,
}

#[deny(clippy::missing_trait_methods)]
impl<A: Tape> AutodiffBackend for Sharded<A> {
    type InnerBackend = A::InnerBackend;
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
            None => A::grad(tensor, &grads.inner),
        }
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        match grads.pieces.get_mut(&A::node(tensor)) {
            Some(piece) => piece.take(),
            None => A::grad_remove(tensor, &mut grads.inner),
        }
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        match grads.pieces.get_mut(&A::node(tensor)) {
            Some(piece) => *piece = Some(grad),
            None => A::grad_replace(tensor, &mut grads.inner, grad),
        }
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        A::inner(tensor)
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
        A::from_inner(tensor)
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
        .filter(|attachment| attachment.exchange().timing() == Timing::DuringBackward)
        .cloned()
        .collect();
    // A loss that depends on no parameter is the inner backend's to refuse.
    if taking.is_empty() || A::depth(&loss).is_none() {
        return loss;
    }
    for attachment in &taking {
        attachment.exchange().begin_backward();
        attachment.submit_unused();
    }
    A::close(loss, taking)
}

impl<A: Tape> ShardedGradients<A> {
    fn finish(&mut self, attachment: &Attachment, device: &A::Device) {
        let exchange = attachment.exchange();
        match exchange.timing() {
            Timing::DuringBackward => {
                let mut reduced = crate::raise(exchange.finish());
                // A model with other leaves, such as one whose weights were loaded, is left to the step.
                if reduced.iter().any(Reduced::is_present) {
                    exchange.note(Arriving::Reduced);
                } else {
                    exchange.note(Arriving::Local);
                }
                for (parameter, node) in attachment.leaves() {
                    let reduced = core::mem::take(&mut reduced[parameter]);
                    let piece = reduced.into_piece(&exchange.layout().parameters()[parameter]);
                    let piece = piece.map(|data| A::InnerBackend::float_from_data(data, device));
                    self.pieces.insert(node, piece);
                }
            }
            Timing::AtTheStep => self.agree(attachment, device),
        }
    }

    /// Makes gradients that are non-finite on any rank NaN on this one, so that whoever skips a step does so everywhere.
    fn agree(&mut self, attachment: &Attachment, device: &A::Device) {
        let exchange = attachment.exchange();
        let leaves = attachment.leaves();
        let culprits = self.non_finite(&leaves, device);
        let agreed = crate::raise(exchange.agree_on_non_finite(&culprits));
        for (parameter, node) in leaves {
            if agreed.contains(&parameter) && !culprits.contains(&parameter) {
                let Parameter { shape, dtype, .. } = &exchange.layout().parameters()[parameter];
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
