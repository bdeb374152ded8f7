//! What is kept of a parameter, on the host, on the device and in a record.

use std::sync::Arc;

use burn::tensor::{DType, Element, TensorData, TensorMetadata};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;
use half::{bf16, f16};
use rayon::prelude::*;

use crate::host::{HostRead, floats};
use crate::offload::{AdamWState, HostAdamW, HostAdamWConfig, HostAdamWError};

/// A parameter whose state is on the host. Clones of an optimizer share it until one of them steps.
#[derive(Debug)]
pub(super) struct HostState {
    pub(super) adamw: HostAdamW,
    pub(super) shape: Vec<usize>,
    /// Of the parameter; the master is f32.
    pub(super) dtype: DType,
}

/// A parameter whose state is on the device: that of Burn's AdamW.
pub(super) struct DeviceState<I: Backend> {
    pub(super) time: usize,
    pub(super) moment_1: FloatTensor<I>,
    pub(super) moment_2: FloatTensor<I>,
}

/// State as it is in a record.
#[derive(Clone, Debug)]
pub(super) struct Saved {
    pub(super) time: usize,
    pub(super) moment_1: TensorData,
    pub(super) moment_2: TensorData,
    /// The f32 master of a parameter of a lower precision. That of an f32 parameter is the parameter.
    pub(super) master: Option<TensorData>,
}

/// State, wherever it is.
pub(super) enum Entry<I: Backend> {
    Host(Arc<HostState>),
    Device(DeviceState<I>),
    Saved(Box<Saved>),
}

impl<I: Backend> Clone for DeviceState<I> {
    fn clone(&self) -> Self {
        Self {
            time: self.time,
            moment_1: self.moment_1.clone(),
            moment_2: self.moment_2.clone(),
        }
    }
}

impl<I: Backend> Clone for Entry<I> {
    fn clone(&self) -> Self {
        match self {
            Self::Host(state) => Self::Host(state.clone()),
            Self::Device(state) => Self::Device(state.clone()),
            Self::Saved(saved) => Self::Saved(saved.clone()),
        }
    }
}

impl<I: Backend> Entry<I> {
    /// The shapes that belong to its parameter.
    pub(super) fn shapes(&self) -> Vec<Vec<usize>> {
        match self {
            Self::Host(state) => vec![state.shape.clone()],
            Self::Device(state) => vec![state.moment_1.shape().to_vec()],
            Self::Saved(saved) => {
                let all = [
                    Some(&saved.moment_1),
                    Some(&saved.moment_2),
                    saved.master.as_ref(),
                ];
                let all = all.into_iter().flatten();
                all.map(|data| data.shape.to_vec()).collect()
            }
        }
    }

    /// As it is in a record. What is on the device is copied to the host.
    pub(super) fn save(self) -> Saved {
        match self {
            Self::Host(state) => state.save(),
            Self::Device(state) => {
                let moment_1 = HostRead::start::<I>(state.moment_1);
                let moment_2 = HostRead::start::<I>(state.moment_2);
                Saved {
                    time: state.time,
                    moment_1: moment_1.data(),
                    moment_2: moment_2.data(),
                    master: None,
                }
            }
            Self::Saved(saved) => *saved,
        }
    }
}

impl HostState {
    /// A parameter before its first step.
    pub(super) fn new(config: &HostAdamWConfig, value: TensorData) -> Result<Self, HostAdamWError> {
        let (shape, dtype) = (value.shape.to_vec(), value.dtype);
        Ok(Self {
            adamw: HostAdamW::new(config.clone(), &floats(value))?,
            shape,
            dtype,
        })
    }

    /// A parameter that goes on from a record. What the record does not say of the master, the parameter does.
    pub(super) fn from_saved(
        config: &HostAdamWConfig,
        saved: Saved,
        value: TensorData,
    ) -> Result<Self, HostAdamWError> {
        let (shape, dtype) = (value.shape.to_vec(), value.dtype);
        let master = saved.master.unwrap_or(value);
        let state = AdamWState {
            steps: saved.time as u64,
            master: &floats(master),
            moment_1: &floats(saved.moment_1),
            moment_2: &floats(saved.moment_2),
        };
        Ok(Self {
            adamw: HostAdamW::from_state(config.clone(), state)?,
            shape,
            dtype,
        })
    }

    /// A copy, updated with these numbers from now on.
    pub(super) fn copy(&self, config: &HostAdamWConfig) -> Result<Self, HostAdamWError> {
        Ok(Self {
            adamw: HostAdamW::from_state(config.clone(), self.adamw.state()?)?,
            shape: self.shape.clone(),
            dtype: self.dtype,
        })
    }

    /// Takes over the parameter's value, unless the master rounds to it. Whether it did.
    pub(super) fn follow(&mut self, value: TensorData) -> bool {
        let master = self.adamw.master();
        let same = match self.dtype {
            DType::BF16 => rounds_to(master, &value, bf16::from_f32, bf16::to_bits),
            DType::F16 => rounds_to(master, &value, f16::from_f32, f16::to_bits),
            _ => rounds_to(master, &value, |x: f32| x, f32::to_bits),
        };
        if !same {
            copy(&floats(value), self.adamw.master_mut());
        }
        !same
    }

    fn save(&self) -> Saved {
        let data = |values: &[f32]| TensorData::new(values.to_vec(), self.shape.clone());
        let (moment_1, moment_2) = self.adamw.moments();
        Saved {
            time: self.adamw.steps() as usize,
            moment_1: data(moment_1),
            moment_2: data(moment_2),
            master: (self.dtype != DType::F32).then(|| data(self.adamw.master())),
        }
    }
}

fn rounds_to<E: Element + Sync, Bits: PartialEq>(
    master: &[f32],
    value: &TensorData,
    round: impl Fn(f32) -> E + Sync,
    bits: impl Fn(E) -> Bits + Sync,
) -> bool {
    let Ok(value) = value.as_slice::<E>() else {
        return false;
    };
    let pairs = master.par_iter().zip(value.par_iter());
    pairs.all(|(master, value)| bits(round(*master)) == bits(*value))
}

/// On all threads: one does not reach the speed of the memory.
pub(super) fn copy(from: &[f32], to: &mut [f32]) {
    const CHUNK: usize = 1 << 16;
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.copy_from_slice(from));
}
