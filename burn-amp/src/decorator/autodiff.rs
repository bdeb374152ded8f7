//! The backward pass: the loss is scaled before it, gradients are unscaled when they are read.

use burn::tensor::{Tensor, TensorPrimitive};
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::FloatTensor;
use burn_backend::{AutodiffBackend, Backend, FloatDType, Shape, TensorMetadata};
use burn_decorator::weight::{GradientWeight, LossWeight, offer, take};

use super::backend::Autocast;
use super::bring::bring;
use super::tensor::AutocastTensor;
use crate::cast::{Lineage, is_low};
use crate::policy::{Policy, current};
use crate::scaler::{ActiveScale, active_scale};
use crate::watch::in_backward;

/// The gradients of a backward pass of [`Autocast`], which were computed from a scaled loss.
///
/// Reading one returns the true gradient, unscaled in f32: clipping, accumulation, optimizers and the Learner never get a
/// scaled one. The scale is the one that this backward pass used, even if the [`GradScaler`](crate::GradScaler)'s has changed since.
pub struct ScaledGradients<B: AutodiffBackend> {
    inner: B::Gradients,
    scale: Scale<FloatTensor<B::InnerBackend>>,
}

/// The factor of the loss, known to the host or only to the device.
enum Scale<T> {
    One,
    Host { scale: f32, inverse: f32 },
    Device { scale: T, inverse: T },
}

impl<T: Clone> Scale<T> {
    /// The scale times `share`, and the inverse times `weight`.
    fn weighted<I: Backend<FloatTensorPrimitive = T>>(self, share: T, weight: T) -> Self {
        let (scale, inverse) = match self {
            Self::One => (share, weight),
            Self::Host { scale, inverse } => {
                (times::<I>(share, scale), times::<I>(weight, inverse))
            }
            Self::Device { scale, inverse } => {
                (multiply::<I>(share, scale), multiply::<I>(weight, inverse))
            }
        };
        Self::Device { scale, inverse }
    }
}

impl<B: AutodiffBackend> ScaledGradients<B> {
    /// The true gradient behind a scaled one: f32 where a scale was used, otherwise as it is.
    fn unscale(
        &self,
        gradient: FloatTensor<B::InnerBackend>,
    ) -> AutocastTensor<FloatTensor<B::InnerBackend>> {
        let gradient = match &self.scale {
            Scale::One => gradient,
            Scale::Host { inverse, .. } => times::<B::InnerBackend>(gradient, *inverse),
            Scale::Device { inverse, .. } => multiply::<B::InnerBackend>(gradient, inverse.clone()),
        };
        AutocastTensor::with_lineage(gradient, Lineage::Gradient)
    }

    /// The scaled gradient that [`unscale`](Self::unscale) turns into `gradient`.
    fn rescale(&self, gradient: FloatTensor<B::InnerBackend>) -> FloatTensor<B::InnerBackend> {
        match &self.scale {
            Scale::One => gradient,
            Scale::Host { scale, .. } => times::<B::InnerBackend>(gradient, *scale),
            Scale::Device { scale, .. } => multiply::<B::InnerBackend>(gradient, scale.clone()),
        }
    }
}

/// Times a number, in at least f32.
fn times<B: Backend>(tensor: FloatTensor<B>, factor: f32) -> FloatTensor<B> {
    B::float_mul_scalar(raise::<B>(tensor), factor.into())
}

/// To f32, unless the tensor is that wide already.
fn raise<B: Backend>(tensor: FloatTensor<B>) -> FloatTensor<B> {
    let low = is_low(tensor.dtype().into());
    bring::<B>(tensor, low.then_some(FloatDType::F32))
}

/// Times a tensor of one element, in at least f32.
fn multiply<B: Backend>(tensor: FloatTensor<B>, factor: FloatTensor<B>) -> FloatTensor<B> {
    let tensor = raise::<B>(tensor);
    let factor = bring::<B>(factor, Some(tensor.dtype().into()));
    let factor = B::float_reshape(factor, Shape::from(vec![1; tensor.rank()]));
    B::float_mul(tensor, factor)
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
        let loss = loss.tensor;
        let device = B::float_device(&loss);
        // bf16 and f32 have the range and need no scale; a scaler that was made on this thread is still used.
        let needs = current::<P>().low() == Some(FloatDType::F16);
        let unscaled = || flat_inner::<B, P>(&loss);
        let (loss, scale) = match active_scale(&device, needs, unscaled) {
            ActiveScale::None => (loss, Scale::One),
            ActiveScale::Host { scale, inv } => {
                let scaled = times::<B>(loss, scale);
                let inverse = inv;
                (scaled, Scale::Host { scale, inverse })
            }
            ActiveScale::Device { scale, inv } => {
                let scale = primitive(scale);
                let scaled = multiply::<B>(loss, B::from_inner(scale.clone()));
                let inverse = primitive(inv);
                (scaled, Scale::Device { scale, inverse })
            }
        };
        let weight = match scale {
            Scale::One => None,
            _ => take::<LossWeight<FloatTensor<Self::InnerBackend>>>(),
        };
        let Some(LossWeight(weight)) = weight else {
            let inner = in_backward(|| B::backward(loss));
            return ScaledGradients { inner, scale };
        };
        // A weight below 1 (nothing was counted) costs no range, and cannot be divided by.
        let weight = B::InnerBackend::float_clamp_min(weight.tensor, 1.0.into());
        let share = B::InnerBackend::float_recip(weight.clone());
        let loss = multiply::<B>(loss, B::from_inner(share.clone()));
        let backward = || in_backward(|| B::backward(loss));
        let (inner, left) = offer(GradientWeight(weight), backward);
        let scale = match left {
            Some(GradientWeight(weight)) => scale.weighted::<B::InnerBackend>(share, weight),
            None => scale,
        };
        ScaledGradients { inner, scale }
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
        let scaled = grads.rescale(grad.tensor);
        B::grad_replace(&tensor.tensor, &mut grads.inner, scaled);
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        AutocastTensor::with_lineage(B::inner(tensor.tensor), tensor.lineage)
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        // A parameter that an optimizer computed from a gradient takes part in the next forward pass like any other.
        AutocastTensor::new(B::from_inner(tensor.tensor))
    }
}

/// The loss as a scaler looks at it: flattened, without autodiff.
fn flat_inner<B: AutodiffBackend, P: Policy>(
    loss: &FloatTensor<B>,
) -> Tensor<Autocast<B::InnerBackend, P>, 1> {
    let flat = Shape::from(vec![loss.shape().num_elements()]);
    let loss = B::InnerBackend::float_reshape(B::inner(loss.clone()), flat);
    Tensor::from_primitive(TensorPrimitive::Float(AutocastTensor::new(loss)))
}
