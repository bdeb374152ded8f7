//! The part that stays on the device: Burn's AdamW.

use burn::optim::{
    AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, LearningRate, SimpleOptimizer,
};
use burn::tensor::{Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::Backend};
use burn_backend::tensor::{Device, FloatTensor};

use super::state::{DeviceState, Saved};
use crate::offload::{DecayMode, HostAdamWConfig};

/// Burn's AdamW with these numbers, in f32 as it takes them.
pub(super) fn burns(config: &HostAdamWConfig) -> AdamW {
    AdamWConfig::new()
        .with_beta_1(config.beta_1 as f32)
        .with_beta_2(config.beta_2 as f32)
        .with_epsilon(config.epsilon as f32)
        .with_weight_decay(config.weight_decay as f32)
        .with_cautious_weight_decay(config.decay_mode == DecayMode::Cautious)
        .build()
}

impl<I: Backend> DeviceState<I> {
    /// A parameter that goes on from a record.
    pub(super) fn from_saved(saved: Saved, like: &FloatTensor<I>, device: &Device<I>) -> Self {
        let dtype = like.dtype();
        let upload = |data: TensorData| I::float_from_data(data.convert_dtype(dtype), device);
        Self {
            time: saved.time,
            moment_1: upload(saved.moment_1),
            moment_2: upload(saved.moment_2),
        }
    }
}

/// A step of one parameter.
pub(super) fn step<I: Backend, const D: usize>(
    adamw: &AdamW,
    lr: LearningRate,
    parameter: Tensor<I, D>,
    gradient: FloatTensor<I>,
    state: Option<DeviceState<I>>,
) -> (Tensor<I, D>, DeviceState<I>) {
    let tensor = |primitive| Tensor::<I, D>::from_primitive(TensorPrimitive::Float(primitive));
    let state = state.map(|state| {
        let (moment_1, moment_2) = (tensor(state.moment_1), tensor(state.moment_2));
        AdamWState::new(AdaptiveMomentumState::new(state.time, moment_1, moment_2))
    });
    let (parameter, state) = adamw.step(lr, parameter, tensor(gradient), state);
    let state: AdamWState<I, D> = state.expect("AdamW has a state after a step");
    let AdaptiveMomentumState {
        time,
        moment_1,
        moment_2,
        ..
    } = state.momentum;
    let state = DeviceState {
        time,
        moment_1: moment_1.into_primitive().tensor(),
        moment_2: moment_2.into_primitive().tensor(),
    };
    (parameter, state)
}
