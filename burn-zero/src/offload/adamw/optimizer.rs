//! The optimizer: what it keeps.

use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::{AdamW, GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{TensorMetadata, backend::AutodiffBackend};
use burn_backend::Backend;
use burn_decorator::message;

use super::device;
use super::placement::Placement;
use super::record::OffloadRecord;
use super::state::{DeviceState, Entry, HostState};
use crate::offload::arrivals::arrivals;
use crate::offload::landing::Landing;
use crate::offload::marks::Mark;
use crate::offload::{OffloadConfig, OffloadError, raise};

/// AdamW whose moments and f32 master parameters live in host memory and are updated there (ZeRO-Offload, Ren et al., arXiv
/// 2101.06840; DeepSpeed's `offload_optimizer`).
///
/// An `Optimizer` of Burn for any module on any autodiff backend, alone or inside of a
/// [`ZeroOptimizer`](crate::ZeroOptimizer), where each rank's host holds that rank's part. Gradients go to the host as they
/// are, f32, bf16 or f16; parameters come back in their own type. The numbers are [`HostAdamW`](crate::HostAdamW)'s: those of
/// PyTorch to f32 rounding.
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::{HostAdamWConfig, OffloadConfig};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let mut model: nn::Linear<B> = nn::LinearConfig::new(4, 1).init(&device);
///
/// let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init::<B>()?;
/// let loss = |model: &nn::Linear<B>| {
///     let x = Tensor::<B, 2>::ones([8, 4], &device);
///     (model.forward(x) - 1.0).square().mean()
/// };
/// let before = loss(&model).into_scalar();
/// for _ in 0..10 {
///     let gradients = GradientsParams::from_grads(loss(&model).backward(), &model);
///     model = optimizer.step(1e-2, model, gradients);
/// }
/// assert!(loss(&model).into_scalar() < before);
/// # Ok::<(), burn_zero::OffloadError>(())
/// ```
///
/// # Who else changes state and parameters
///
/// A clone has its own state: they share it until one of them steps, which then copies it. A loss scaler that takes steps back
/// (burn-amp's `Detection::Deferred`) keeps a clone of each step and so costs a copy of the state a step: `Detection::Sync`
/// does not.
///
/// Weights that are loaded, clamped or averaged between steps are noticed by their sum, and the host follows. A change
/// that leaves the sum of a parameter as it was, to the bit, is not noticed: see [`follow`](Self::follow).
///
/// A parameter without gradient in a step is left alone, as Burn does. A gradient that is infinite or NaN ends in the moments,
/// as in Burn and PyTorch; a warning in the log names the parameter.
///
/// # Panics
///
/// A step panics with the message of an [`OffloadError`]: [`UnsupportedDtype`](OffloadError::UnsupportedDtype),
/// [`OtherShape`](OffloadError::OtherShape), [`Host`](OffloadError::Host) for a learning rate that is negative or not
/// finite, before anything has changed; [`Parameter`](OffloadError::Parameter) where the host has no memory for a parameter's
/// state. Loading a record of AMSGrad panics with [`AmsGrad`](OffloadError::AmsGrad).
///
/// # Cost
///
/// 12 bytes of host memory an element, and on a [`Sharded`](crate::Sharded) backend 4 for its gradient. Of the device: nothing but a
/// number a parameter, during backward three [buckets](OffloadConfig::bucket_elements) of gradients, and during a step
/// [`staging`](OffloadConfig::staging) parameters on their way; on other backends all gradients until the step. A backward pass moves
/// each gradient down, while it goes on, and a step each parameter up, the first step each parameter down; updating a parameter
/// overlaps with the upload of the last. Inside of a [`ZeroOptimizer`](crate::ZeroOptimizer) of several ranks updated pieces are gathered
/// from the host, and go up with those of all.
pub struct OffloadedAdamW<B: AutodiffBackend> {
    pub(super) config: OffloadConfig,
    pub(super) burns: AdamW,
    pub(super) placement: Option<Placement>,
    pub(super) host: HashMap<ParamId, Kept<B::InnerBackend>>,
    pub(super) device: HashMap<ParamId, DeviceState<B::InnerBackend>>,
    /// From a record, until their first steps.
    pub(super) loaded: HashMap<ParamId, Entry<B::InnerBackend>>,
    pub(super) landing: Landing,
}

/// A parameter that the host knows.
pub(super) struct Kept<I: Backend> {
    pub(super) state: Arc<HostState>,
    /// The parameter as it was uploaded; `None` if the host is to look anew.
    pub(super) mark: Option<Mark<I>>,
}

impl<I: Backend> Clone for Kept<I> {
    fn clone(&self) -> Self {
        Self {
            state: self.state.clone(),
            mark: self.mark.clone(),
        }
    }
}

impl<B: AutodiffBackend> Clone for OffloadedAdamW<B> {
    fn clone(&self) -> Self {
        Self {
            config: self.config.clone(),
            burns: self.burns.clone(),
            placement: self.placement.clone(),
            host: self.host.clone(),
            device: self.device.clone(),
            loaded: self.loaded.clone(),
            landing: self.landing.clone(),
        }
    }
}

impl<B: AutodiffBackend> OffloadedAdamW<B> {
    /// Before the first step: [`OffloadConfig::init`].
    pub(in crate::offload) fn new(config: OffloadConfig) -> Result<Self, OffloadError> {
        config.validate()?;
        Ok(Self {
            burns: device::burns(&config.adamw),
            config,
            placement: None,
            host: HashMap::new(),
            device: HashMap::new(),
            loaded: HashMap::new(),
            landing: Landing::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &OffloadConfig {
        &self.config
    }

    /// Makes the next step take over the weights of the module that it gets, whatever the host has: after a change that no sum
    /// shows. Moments and step counts stay. Costs a download of the parameters.
    pub fn follow(&mut self) {
        for kept in self.host.values_mut() {
            kept.mark = None;
        }
    }

    /// Makes the gradients of a model leave the device in its first backward pass too; a step does so for the model that it returns.
    /// On the thread that trains. Of no effect on a backend that is not a [`Sharded`](crate::Sharded) one, and inside of a
    /// [`ZeroOptimizer`](crate::ZeroOptimizer), whose own [`prepare`](crate::ZeroOptimizer::prepare) does it.
    pub fn prepare<M: AutodiffModule<B>>(&mut self, module: &M) {
        let arrivals = raise(arrivals::<B, M>(module, GradientsParams::new().into()));
        self.place(&arrivals);
        raise(self.look_out(module));
    }

    /// Elements whose state is on the host and on the device, of parameters that have taken a step.
    pub fn elements(&self) -> (usize, usize) {
        let host = self.host.values().map(|kept| kept.state.adamw.len()).sum();
        let device = self.device.values();
        let device = device.map(|state| state.moment_1.shape().num_elements());
        (host, device.sum())
    }

    /// Bytes of state on the host (masters and moments) and on the device (moments), of parameters that have taken a step: of
    /// the buffers and tensors that there are.
    pub fn state_bytes(&self) -> (usize, usize) {
        let host = self.host.values().map(|kept| {
            let (moment_1, moment_2) = kept.state.adamw.moments();
            size_of_val(kept.state.adamw.master()) + size_of_val(moment_1) + size_of_val(moment_2)
        });
        let device = self.device.values().map(|state| {
            let moments = [&state.moment_1, &state.moment_2];
            let bytes = moments.map(|moment| moment.shape().num_elements() * moment.dtype().size());
            bytes.iter().sum::<usize>()
        });
        (host.sum(), device.sum())
    }

    fn entries(&self) -> HashMap<ParamId, Entry<B::InnerBackend>> {
        let host = self.host.iter();
        let host = host.map(|(id, kept)| (*id, Entry::Host(kept.state.clone())));
        let device = self.device.iter();
        let device = device.map(|(id, state)| (*id, Entry::Device(state.clone())));
        let loaded = self.loaded.iter().map(|(id, entry)| (*id, entry.clone()));
        host.chain(device).chain(loaded).collect()
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizer<M, B> for OffloadedAdamW<B> {
    type Record = OffloadRecord<B::InnerBackend>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        if message::received().is_some() {
            return module;
        }
        raise(self.advance(lr, module, grads.into()))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        raise(self.advance(lr, module, grads.into()))
    }

    fn to_record(&self) -> Self::Record {
        OffloadRecord::new(self.entries())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.loaded = raise(record.into_entries());
        self.host.clear();
        self.device.clear();
        self
    }
}

impl<B: AutodiffBackend> fmt::Debug for OffloadedAdamW<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, device) = self.elements();
        f.debug_struct("OffloadedAdamW")
            .field("config", &self.config)
            .field("host_elements", &host)
            .field("device_elements", &device)
            .finish_non_exhaustive()
    }
}
