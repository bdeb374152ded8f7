//! Optimizers that Burn has not, each of which needs more than its own element.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use burn::module::{AutodiffModule, ModuleVisitor, Param, ParamId};
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{
    GradientsParams, LearningRate, MultiGradientsParams, Optimizer, SimpleOptimizer,
};
use burn::prelude::*;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

/// LAMB's idea without its details: each tensor's step is as long as the tensor itself, whatever
/// its gradient.
#[derive(Clone, Debug)]
pub struct Trusting;

#[derive(Record, Clone)]
pub struct TrustingState<B: Backend, const D: usize> {
    pub steps: usize,
    pub velocity: Tensor<B, D>,
}

pub fn trusting<M: AutodiffModule<B>, B: AutodiffBackend>() -> OptimizerAdaptor<Trusting, M, B> {
    OptimizerAdaptor::from(Trusting)
}

fn norm<I: Backend, const D: usize>(tensor: Tensor<I, D>) -> Tensor<I, D> {
    tensor
        .square()
        .sum()
        .sqrt()
        .add_scalar(1e-8)
        .reshape([1; D])
}

impl<I: Backend> SimpleOptimizer<I> for Trusting {
    type State<const D: usize> = TrustingState<I, D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<I, D>,
        grad: Tensor<I, D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<I, D>, Option<Self::State<D>>) {
        let (steps, velocity) = match state {
            Some(state) => (state.steps + 1, state.velocity * 0.9 + grad * 0.1),
            None => (1, grad * 0.1),
        };
        let corrected = velocity.clone() / (1.0 - 0.9_f64.powi(steps as i32));
        let trust = norm(tensor.clone()) / norm(corrected.clone());
        let state = TrustingState { steps, velocity };
        (tensor - corrected * trust * lr, Some(state))
    }

    fn to_device<const D: usize>(mut state: Self::State<D>, device: &Device<I>) -> Self::State<D> {
        state.velocity = state.velocity.to_device(device);
        state
    }
}

/// Multiplies each parameter by 1 plus so many of f32's last bits.
#[derive(Clone, Debug)]
pub struct Grows(pub f32);

impl<I: Backend> SimpleOptimizer<I> for Grows {
    type State<const D: usize> = TrustingState<I, D>;

    fn step<const D: usize>(
        &self,
        _: LearningRate,
        tensor: Tensor<I, D>,
        _: Tensor<I, D>,
        _: Option<Self::State<D>>,
    ) -> (Tensor<I, D>, Option<Self::State<D>>) {
        (tensor.mul_scalar(1.0 + self.0 * f32::EPSILON), None)
    }

    fn to_device<const D: usize>(state: Self::State<D>, _: &Device<I>) -> Self::State<D> {
        state
    }
}

/// What an optimizer looks at beside the tensor that it updates.
#[derive(Clone, Copy, Debug)]
pub enum LooksAt {
    /// The norm of all gradients, by which it clips.
    GradientNorm,
    /// The largest element of all gradients so far: in the way of Prodigy, that sets the step.
    LargestSoFar,
    /// How many tensors there are.
    Tensors,
    /// How many steps it and its clones have taken.
    StepsOfClones,
}

/// An optimizer whose learning rate depends on all tensors that it meets. Nothing in its name says
/// so.
#[derive(Clone, Debug)]
pub struct Adaptive<O> {
    pub inner: O,
    pub looks_at: LooksAt,
    pub largest: f32,
    steps: Arc<AtomicU32>,
}

impl<O> Adaptive<O> {
    pub fn new(inner: O, looks_at: LooksAt) -> Self {
        Self {
            inner,
            looks_at,
            largest: 1.0,
            steps: Arc::default(),
        }
    }

    fn rate<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        gradients: &GradientsParams,
    ) -> f64 {
        struct See<'a> {
            gradients: &'a GradientsParams,
            squares: f32,
            largest: f32,
            tensors: usize,
        }
        impl<B: AutodiffBackend> ModuleVisitor<B> for See<'_> {
            fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
                let id: ParamId = param.id;
                let Some(gradient) = self.gradients.get::<B::InnerBackend, D>(id) else {
                    return;
                };
                self.tensors += 1;
                for element in gradient.into_data().iter::<f32>() {
                    self.squares += element * element;
                    self.largest = self.largest.max(element.abs());
                }
            }
        }
        let mut see = See {
            gradients,
            squares: 0.0,
            largest: self.largest,
            tensors: 0,
        };
        module.visit(&mut see);
        self.largest = see.largest;
        match self.looks_at {
            LooksAt::GradientNorm => 1.0 / f64::from(see.squares.sqrt().max(1.0)),
            LooksAt::LargestSoFar => 1.0 / f64::from(see.largest),
            LooksAt::Tensors => 1.0 / see.tensors.max(1) as f64,
            LooksAt::StepsOfClones => {
                1.0 / f64::from(1 + self.steps.fetch_add(1, Ordering::Relaxed))
            }
        }
    }
}

impl<O, M, B> Optimizer<M, B> for Adaptive<O>
where
    O: Optimizer<M, B>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = O::Record;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        let rate = self.rate::<B, M>(&module, &grads);
        self.inner.step(lr * rate, module, grads)
    }

    fn step_multi(&mut self, _: LearningRate, _: M, _: MultiGradientsParams) -> M {
        unreachable!("these tests have one device a rank")
    }

    fn to_record(&self) -> Self::Record {
        self.inner.to_record()
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record);
        self
    }
}
