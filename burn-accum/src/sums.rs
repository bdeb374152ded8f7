//! The accumulators: one per parameter, in f32 on every backend.

use std::{any::Any, collections::HashMap};

use burn::{
    module::{AutodiffModule, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{
        Tensor, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
    },
};

use crate::arrived::Arrived;

/// The sums of a window's gradients on the backend `I`. Parameters that got none have no entry.
pub(crate) type Sums<I> = HashMap<ParamId, TensorPrimitive<I>>;

/// [`Sums`] with the backend's type erased: only the methods of the optimizer know it, not its type.
#[derive(Default)]
pub(crate) struct AnySums(Option<Box<dyn Erased>>);

trait Erased: Any + Send {
    fn duplicate(&self) -> Box<dyn Erased>;
}

impl<I: Backend> Erased for Sums<I> {
    fn duplicate(&self) -> Box<dyn Erased> {
        Box::new(self.clone())
    }
}

impl Clone for AnySums {
    /// Shares the tensors until one of the two adds to them.
    fn clone(&self) -> Self {
        Self(self.0.as_ref().map(|sums| sums.duplicate()))
    }
}

impl<I: Backend> From<Sums<I>> for AnySums {
    fn from(sums: Sums<I>) -> Self {
        Self(Some(Box::new(sums)))
    }
}

impl AnySums {
    /// A copy that shares the tensors.
    pub(crate) fn to_sums<I: Backend>(&self) -> Sums<I> {
        self.clone().into_sums()
    }

    fn into_sums<I: Backend>(self) -> Sums<I> {
        let Some(sums) = self.0 else {
            return Sums::<I>::new();
        };
        let sums: Box<dyn Any> = sums;
        *sums
            .downcast()
            .expect("the gradients of a window are of one backend")
    }

    /// Adds the gradients of a micro-step, in place: reads each gradient, reads and writes each sum. The first ones of
    /// a window are not copied, but become the sums.
    pub(crate) fn add<B, M>(&mut self, module: &M, arrived: Arrived)
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut adder = Adder {
            arrived,
            sums: core::mem::take(self).into_sums::<B::InnerBackend>(),
        };
        module.visit(&mut adder);
        *self = adder.sums.into();
    }

    /// Ends the window: the sums divided by `divisor`, in the data types of the parameters.
    pub(crate) fn divide<B, M>(&mut self, module: &M, divisor: f64) -> GradientsParams
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut divider = Divider {
            sums: core::mem::take(self).into_sums::<B::InnerBackend>(),
            divisor,
            gradients: GradientsParams::new(),
        };
        module.visit(&mut divider);
        divider.gradients
    }
}

struct Adder<I: Backend> {
    arrived: Arrived,
    sums: Sums<I>,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Adder<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        // Removed from the map for the addition, because only a tensor with one owner is overwritten in place.
        let sum = self.sums.remove(&param.id).map(Tensor::from_primitive);
        let sum = self.arrived.add_to::<B::InnerBackend, D>(param.id, sum);
        if let Some(sum) = sum {
            self.sums.insert(param.id, sum.into_primitive());
        }
    }
}

struct Divider<I: Backend> {
    sums: Sums<I>,
    divisor: f64,
    gradients: GradientsParams,
}

impl<B: AutodiffBackend> ModuleVisitor<B> for Divider<B::InnerBackend> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        let Some(sum) = self.sums.remove(&param.id) else {
            return;
        };
        let mut sum = Tensor::<B::InnerBackend, D>::from_primitive(sum);
        if self.divisor != 1.0 {
            sum = sum.div_scalar(self.divisor);
        }
        let dtype = param.val().dtype();
        if sum.dtype() != dtype {
            sum = sum.cast(dtype);
        }
        self.gradients.register(param.id, sum);
    }
}
