//! The backward pass: the loss is scaled before it, gradients are unscaled when they are read.

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Shape, TensorMetadata};
use burn_decorator::gradient;
use burn_decorator::weight::{GradientWeight, LossWeight, offer, take};

use super::backend::Autocast;
use super::bring::bring;
use super::tensor::AutocastTensor;
use crate::cast::{Lineage, UNDER_WAY, UnderWay, is_low};
use crate::policy::{Mode, Policy};
use crate::scaler::{Factor, active_scale, is_watching, see};

/// The gradients of a backward pass of [`Autocast`], which were computed from a scaled loss.
///
/// Reading one returns the true gradient, unscaled in f32: clipping, accumulation, optimizers and
/// the Learner never get a scaled one. The scale is the one that this backward pass used, even if
/// the [`GradScaler`](crate::GradScaler)'s has changed since.
pub struct ScaledGradients<B: AutodiffBackend> {
    inner: B::Gradients,
    /// What the loss was multiplied with.
    scale: Factor<FloatTensor<B::InnerBackend>>,
    /// What a gradient is multiplied with when it is read.
    inverse: Factor<FloatTensor<B::InnerBackend>>,
}

impl<B: AutodiffBackend> ScaledGradients<B> {
    /// The true gradient behind a scaled one: f32 where a scale was used, otherwise as it is.
    fn unscale(
        &self,
        gradient: FloatTensor<B::InnerBackend>,
    ) -> AutocastTensor<FloatTensor<B::InnerBackend>> {
        if is_watching() {
            see(flat::<B::InnerBackend>(gradient.clone()));
        }
        let gradient = times::<B::InnerBackend>(gradient, &self.inverse);
        AutocastTensor::with_lineage(gradient, Lineage::Gradient)
    }
}

/// The product in at least f32; the tensor as it is where there is no factor.
fn times<B: Backend>(tensor: FloatTensor<B>, factor: &Factor<FloatTensor<B>>) -> FloatTensor<B> {
    let raise = |tensor: FloatTensor<B>| {
        let low = is_low(tensor.dtype().into());
        bring::<B>(tensor, low.then_some(FloatDType::F32))
    };
    match factor {
        Factor::None => tensor,
        Factor::Host(factor) => B::float_mul_scalar(raise(tensor), (*factor).into()),
        Factor::Device(factor) => {
            let tensor = raise(tensor);
            let factor = bring::<B>(factor.clone(), Some(tensor.dtype().into()));
            let factor = B::float_reshape(factor, Shape::from(vec![1; tensor.rank()]));
            B::float_mul(tensor, factor)
        }
    }
}

/// The inner backend's tensor behind a [`Tensor`] of the decorator.
fn primitive<B: Backend, P: Policy>(tensor: Tensor<Autocast<B, P>, 1>) -> FloatTensor<B> {
    tensor.into_primitive().tensor().tensor
}

#[deny(clippy::missing_trait_methods)]
impl<B: AutodiffBackend, P: Policy> AutodiffBackend for Autocast<B, P> {
    type InnerBackend = Autocast<B::InnerBackend, P>;
    type Gradients = ScaledGradients<B>;

    burn_decorator::forward_inner!(B);

    fn backward(loss: FloatTensor<Self>) -> Self::Gradients {
        let (loss, lineage) = (loss.tensor, loss.lineage);
        if is_watching() {
            see(flat::<B::InnerBackend>(B::inner(loss.clone())));
        }
        let device = B::float_device(&loss);
        // bf16 and f32 have the range and need no scale; a scaler that was made on this thread is
        // still used.
        let needs = Mode::current::<P>().low() == Some(FloatDType::F16);
        let unscaled = || flat_inner::<B, P>(&loss);
        let factors = active_scale(&device, lineage, needs, unscaled);
        let [mut scale, mut inverse] = factors.map(|factor| factor.map(primitive));
        let loss = times::<B>(loss, &scale.clone().map(B::from_inner));
        let weight = match scale {
            Factor::None => None,
            _ => take::<LossWeight<FloatTensor<Self::InnerBackend>>>(),
        };
        let Some(LossWeight(weight)) = weight else {
            let inner = gradient::backward(|| B::backward(loss));
            return ScaledGradients {
                inner,
                scale,
                inverse,
            };
        };
        // A weight below 1 (nothing was counted) costs no range, and cannot be divided by.
        let weight = B::InnerBackend::float_clamp_min(weight.tensor, 1.0.into());
        let share = B::InnerBackend::float_recip(weight.clone());
        let loss = times::<B>(loss, &Factor::Device(B::from_inner(share.clone())));
        let backward = || gradient::backward(|| B::backward(loss));
        let (inner, left) = offer(GradientWeight(weight), backward);
        if let Some(GradientWeight(weight)) = left {
            scale = Factor::Device(times::<B::InnerBackend>(share, &scale));
            inverse = Factor::Device(times::<B::InnerBackend>(weight, &inverse));
        }
        ScaledGradients {
            inner,
            scale,
            inverse,
        }
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        let gradient = B::grad(&tensor.tensor, &grads.inner)?;
        Some(grads.unscale(gradient))
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        let gradient = B::grad_remove(&tensor.tensor, &mut grads.inner)?;
        Some(grads.unscale(gradient))
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        let scaled = times::<B::InnerBackend>(grad.tensor, &grads.scale);
        B::grad_replace(&tensor.tensor, &mut grads.inner, scaled);
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        AutocastTensor::with_lineage(B::inner(tensor.tensor), tensor.lineage)
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        // A parameter that an optimizer computed from a gradient takes part in the next forward
        // pass like any other.
        let lineage = match (UNDER_WAY.get(), tensor.lineage) {
            (Some(step), _) => {
                UNDER_WAY.set(Some(UnderWay {
                    updated: true,
                    ..step
                }));
                Lineage::Trained(step.owner)
            }
            (None, Lineage::Gradient) => Lineage::Forward,
            (None, lineage) => lineage,
        };
        AutocastTensor::with_lineage(B::from_inner(tensor.tensor), lineage)
    }
}

/// The loss as a scaler looks at it: flattened, without autodiff.
fn flat_inner<B: AutodiffBackend, P: Policy>(
    loss: &FloatTensor<B>,
) -> Tensor<Autocast<B::InnerBackend, P>, 1> {
    let flat = flat::<B::InnerBackend>(B::inner(loss.clone()));
    let autocast = AutocastTensor::new(flat.into_primitive().tensor());
    Tensor::from_primitive(TensorPrimitive::Float(autocast))
}

fn flat<B: Backend>(tensor: FloatTensor<B>) -> Tensor<B, 1> {
    let flat = Shape::from(vec![tensor.shape().num_elements()]);
    let tensor = B::float_reshape(tensor, flat);
    Tensor::from_primitive(TensorPrimitive::Float(tensor))
}
