//! An optimizer that Burn has not, which needs the norm of each parameter.

use burn::module::AutodiffModule;
use burn::optim::adaptor::OptimizerAdaptor;
use burn::optim::{LearningRate, SimpleOptimizer};
use burn::prelude::*;
use burn::record::Record;
use burn::tensor::backend::AutodiffBackend;

/// LAMB's idea without its details: each tensor's step is as long as the tensor itself, whatever its gradient.
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
