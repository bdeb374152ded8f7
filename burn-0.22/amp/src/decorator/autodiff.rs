//! The backward pass: the loss is scaled before it, gradients are unscaled when they are read.

use burn_backend::distributed::{DistributedParamId, DistributedParams};
use burn_backend::tensor::{BoolTensor, FloatTensor, IntTensor, QuantizedTensor};
use burn_backend::{AutodiffBackend, Backend, FloatDType, TensorMetadata};

use super::backend::{Autocast, Recorded};
use super::bring::bring;
use crate::cast::is_low;
use crate::scaler;

/// The gradients of a backward pass of [`Autocast`], computed from a scaled loss. Reading one
/// returns the true gradient, unscaled in f32.
pub struct ScaledGradients<B: AutodiffBackend> {
    inner: B::Gradients,
    scale: Option<f32>,
}

impl<B: AutodiffBackend> ScaledGradients<B> {
    fn unscale(&self, gradient: FloatTensor<B::InnerBackend>) -> FloatTensor<B::InnerBackend> {
        match self.scale {
            None => gradient,
            // Rounded once, from f64, as PyTorch's `scale.double().reciprocal().float()`.
            Some(scale) => times::<B::InnerBackend>(gradient, (1.0 / f64::from(scale)) as f32),
        }
    }
}

/// Times a number, in at least f32.
fn times<B: Backend>(tensor: FloatTensor<B>, factor: f32) -> FloatTensor<B> {
    let low = is_low(tensor.dtype().into());
    let tensor = bring::<B>(tensor, low.then_some(FloatDType::F32));
    B::float_mul_scalar(tensor, factor.into())
}

impl<B: AutodiffBackend + Recorded> AutodiffBackend for Autocast<B>
where
    B::InnerBackend: Recorded,
{
    type InnerBackend = Autocast<B::InnerBackend>;
    type Gradients = ScaledGradients<B>;

    fn backward(loss: FloatTensor<Self>) -> Self::Gradients {
        let scale = scaler::active();
        let loss = match scale {
            None => loss,
            Some(scale) => times::<B>(loss, scale),
        };
        ScaledGradients {
            inner: B::backward(loss),
            scale,
        }
    }

    fn grad(
        tensor: &FloatTensor<Self>,
        grads: &Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        B::grad(tensor, &grads.inner).map(|gradient| grads.unscale(gradient))
    }

    fn grad_remove(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
    ) -> Option<FloatTensor<Self::InnerBackend>> {
        B::grad_remove(tensor, &mut grads.inner).map(|gradient| grads.unscale(gradient))
    }

    fn grad_replace(
        tensor: &FloatTensor<Self>,
        grads: &mut Self::Gradients,
        grad: FloatTensor<Self::InnerBackend>,
    ) {
        let grad = match grads.scale {
            None => grad,
            Some(scale) => times::<B::InnerBackend>(grad, scale),
        };
        B::grad_replace(tensor, &mut grads.inner, grad);
    }

    fn inner(tensor: FloatTensor<Self>) -> FloatTensor<Self::InnerBackend> {
        B::inner(tensor)
    }

    fn int_inner(tensor: IntTensor<Self>) -> IntTensor<Self::InnerBackend> {
        B::int_inner(tensor)
    }

    fn bool_inner(tensor: BoolTensor<Self>) -> BoolTensor<Self::InnerBackend> {
        B::bool_inner(tensor)
    }

    fn q_inner(tensor: QuantizedTensor<Self>) -> QuantizedTensor<Self::InnerBackend> {
        B::q_inner(tensor)
    }

    fn from_inner(tensor: FloatTensor<Self::InnerBackend>) -> FloatTensor<Self> {
        B::from_inner(tensor)
    }

    fn int_from_inner(tensor: IntTensor<Self::InnerBackend>) -> IntTensor<Self> {
        B::int_from_inner(tensor)
    }

    fn bool_from_inner(tensor: BoolTensor<Self::InnerBackend>) -> BoolTensor<Self> {
        B::bool_from_inner(tensor)
    }

    fn q_from_inner(tensor: QuantizedTensor<Self::InnerBackend>) -> QuantizedTensor<Self> {
        B::q_from_inner(tensor)
    }

    fn set_distributed_params(
        tensor: FloatTensor<Self>,
        id: DistributedParamId,
    ) -> FloatTensor<Self> {
        B::set_distributed_params(tensor, id)
    }

    fn distributed_params(tensor: &FloatTensor<Self>) -> Option<DistributedParams> {
        B::distributed_params(tensor)
    }

    fn is_distributed(tensor: &FloatTensor<Self>) -> bool {
        B::is_distributed(tensor)
    }
}
