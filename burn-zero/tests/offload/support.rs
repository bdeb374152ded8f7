//! Models and data that the laws share.

#[path = "../support/parameters.rs"]
mod parameters_of;
#[path = "../support/values.rs"]
mod values_of;

use burn::backend::Autodiff;
use burn::module::{Module, Param};
use burn::optim::{GradientsParams, Optimizer};
use burn::prelude::*;
use burn::tensor::{DType, TensorData};
use burn_flex::Flex;
use burn_zero::{HostAdamWConfig, OffloadConfig};

pub use parameters_of::parameters;
use values_of::values;

pub type B = Autodiff<Flex>;

/// Parameters of several shapes and types, one that has no gradient in odd steps, one that never
/// has any.
#[derive(Module, Debug)]
pub struct Net<B: Backend> {
    pub matrix: Param<Tensor<B, 2>>,
    pub inner: Inner<B>,
    pub never: Param<Tensor<B, 1>>,
}

#[derive(Module, Debug)]
pub struct Inner<B: Backend> {
    pub sometimes: Param<Tensor<B, 1>>,
    pub low: Param<Tensor<B, 3>>,
}

impl<B: Backend> Net<B> {
    /// The same in every process; `low` is of this type.
    pub fn new(low: DType) -> Self {
        Self {
            matrix: Param::from_tensor(tensor(1, [9, 13])),
            inner: Inner {
                sometimes: Param::from_tensor(tensor(2, [7])),
                low: Param::from_tensor(tensor::<B, 3>(3, [2, 5, 3]).cast(low)),
            },
            never: Param::from_tensor(tensor(4, [3])),
        }
    }
}

impl Net<B> {
    /// Gradients that look random, of each parameter's type.
    pub fn gradients(&self, step: usize) -> GradientsParams {
        let mut gradients = GradientsParams::new();
        let seed = 1000 + 10 * step;
        gradients.register(self.matrix.id, tensor::<Flex, 2>(seed, [9, 13]));
        if step.is_multiple_of(2) {
            gradients.register(self.inner.sometimes.id, tensor::<Flex, 1>(seed + 1, [7]));
        }
        let low = tensor::<Flex, 3>(seed + 2, [2, 5, 3]).cast(self.inner.low.val().dtype());
        gradients.register(self.inner.low.id, low);
        gradients
    }
}

/// The same model for the same seed.
pub fn tensor<B: Backend, const D: usize>(seed: usize, shape: [usize; D]) -> Tensor<B, D> {
    let elements = shape.iter().product();
    let data = TensorData::new(values(elements, seed), shape);
    Tensor::from_data(data, (&Default::default(), DType::F32))
}

/// The bits of all parameters.
pub fn bits<B: Backend, M: Module<B>>(module: &M) -> Vec<Vec<u32>> {
    let parameters = parameters(module).into_iter();
    parameters
        .map(|values| values.into_iter().map(f32::to_bits).collect())
        .collect()
}

/// Steps `from..to`.
pub fn train<O: Optimizer<Net<B>, B>>(
    optimizer: &mut O,
    mut model: Net<B>,
    steps: core::ops::Range<usize>,
) -> Net<B> {
    for step in steps {
        let gradients = model.gradients(step);
        model = optimizer.step(0.01, model, gradients);
    }
    model
}

/// Burn's defaults, of which f32 and f64 have the same.
pub fn config() -> OffloadConfig {
    let adamw = HostAdamWConfig {
        epsilon: 1e-5,
        weight_decay: 0.125,
        ..Default::default()
    };
    OffloadConfig::new(adamw)
}
