//! AdamW with its state on the host, as an optimizer of modules.
//!
//! While one parameter is updated, the gradients of the next are downloaded and the last one is uploaded:
//!
//! ```text
//! device to host   gradient 1 | gradient 2 | gradient 3 | ..
//! this thread      update 0   | update 1   | update 2   | ..    on all cores
//! host to device              | value 0    | value 1    | ..
//! ```

use core::fmt;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{
    AdamW, AdamWConfig, AdamWState, AdaptiveMomentumState, GradientsParams, LearningRate,
    MultiGradientsParams, Optimizer, SimpleOptimizer,
};
use burn::tensor::{
    DType, Tensor, TensorData, TensorMetadata, TensorPrimitive, backend::AutodiffBackend,
};
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::host_state::{HostState, OffloadRecord, State, moments};
use super::parameters::{HostLink, NewValue, StepParameter, host_step};
use super::{AdamWStep, DecayMode, HostAdamWConfig, OffloadConfig, OffloadError, raise};
use crate::host::{HostRead, is_finite};

/// AdamW whose moments and f32 master parameters live in host memory and are updated there (ZeRO-Offload, Ren et al., arXiv
/// 2101.06840; DeepSpeed's `offload_optimizer`).
///
/// An `Optimizer` of Burn for any module on any autodiff backend, alone or inside of a
/// [`ZeroOptimizer`](crate::ZeroOptimizer), where each rank's host holds that rank's shard. Gradients are downloaded and parameters
/// uploaded in their own types: f32, bf16 or f16. The numbers are [`HostAdamW`](crate::HostAdamW)'s: those of
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
/// # Clones, and weights changed outside of steps
///
/// Clones share state until one of them steps, which copies it first. A loss scaler that undoes steps
/// (burn-amp's `Detection::Deferred`) keeps a clone and so costs a copy of the state a step; `Detection::Sync`
/// does not.
///
/// Weights that are loaded, clamped or averaged between steps are new leaves of the autodiff graph. The next step downloads them, and
/// they become the masters, unless the masters round to them. On a backend that does not expose
/// its leaves (neither `Autodiff` nor with [`Sharded`](crate::Sharded) in it) each step downloads all parameters.
///
/// A parameter without gradient in a step is not updated, as in Burn. An infinite or NaN gradient makes the moments non-finite,
/// as in Burn and PyTorch; a warning in the log names the parameter.
///
/// # Panics
///
/// A step panics with the message of an [`OffloadError`]: [`UnsupportedDtype`](OffloadError::UnsupportedDtype),
/// [`OtherShape`](OffloadError::OtherShape), [`InvalidValue`](OffloadError::InvalidValue) for a learning rate that is negative or not
/// finite, before anything has changed; [`Parameter`](OffloadError::Parameter) where the host has no memory for a parameter's
/// state. Loading a record of AMSGrad panics with [`AmsGrad`](OffloadError::AmsGrad).
///
/// # Cost
///
/// 12 bytes of host memory an element, and on a [`Sharded`](crate::Sharded) backend 4 for its gradient. On the device:
/// during backward three [buckets](OffloadConfig::bucket_elements) of gradients, and during a step
/// [`staging`](OffloadConfig::staging) parameters in transfer; on other backends all gradients until the step. Backward downloads
/// each gradient, a step uploads each parameter, and the first step also downloads each; the update of a parameter
/// overlaps with the transfers of its neighbours. Inside a [`ZeroOptimizer`](crate::ZeroOptimizer) updated shards stay in host memory,
/// are gathered from there, and are uploaded with those of all ranks.
#[derive(Clone)]
pub struct OffloadedAdamW<B: AutodiffBackend> {
    config: OffloadConfig,
    /// Parameters whose state is on the device. Decided once, and a function of model and ratio, so that records need not contain it.
    on_device: Option<HashSet<ParamId>>,
    /// Of parameters that have taken a step, or are in a loaded record.
    states: HashMap<ParamId, State<B::InnerBackend>>,
    link: HostLink,
}

impl<B: AutodiffBackend> OffloadedAdamW<B> {
    /// An optimizer before its first step: see [`OffloadConfig::init`].
    pub(super) fn new(config: OffloadConfig) -> Result<Self, OffloadError> {
        config.validate()?;
        Ok(Self {
            config,
            on_device: None,
            states: HashMap::new(),
            link: HostLink::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &OffloadConfig {
        &self.config
    }

    /// Makes the gradients of a model leave the device in its first backward pass; a step does so for the model that it returns.
    /// To be called on the thread that trains. Has no effect on a backend that is not [`Sharded`](crate::Sharded), nor inside a
    /// [`ZeroOptimizer`](crate::ZeroOptimizer), whose own [`prepare`](crate::ZeroOptimizer::prepare) does it.
    pub fn prepare<M: AutodiffModule<B>>(&mut self, module: &M) {
        let parameters = self
            .link
            .parameters::<B, M>(module, GradientsParams::new().into());
        self.place(&raise(parameters));
        raise(self.attach(module));
    }

    /// Elements whose state is on the host and on the device, of parameters that have taken a step.
    pub fn elements(&self) -> (usize, usize) {
        self.count(1, |_| 1)
    }

    /// Bytes of state on the host (masters and moments) and on the device (moments), of parameters that have taken a step.
    pub fn state_bytes(&self) -> (usize, usize) {
        self.count(3 * size_of::<f32>(), |dtype| 2 * dtype.size())
    }

    /// Sums over the elements on the host and on the device, where the type of the moments is given.
    fn count(&self, on_host: usize, on_device: impl Fn(DType) -> usize) -> (usize, usize) {
        let states = self.states.values();
        states.fold((0, 0), |(host, device), state| match state {
            State::Host(state) => (host + on_host * state.adamw.len(), device),
            State::Device(state) => {
                let [moment, _] = moments(state);
                let elements = moment.shape().num_elements();
                (host, device + on_device(moment.dtype()) * elements)
            }
            State::Saved(_) => (host, device),
        })
    }

    /// Decides once which parameters' state stays on the device: in order, those that fit into the device's part, which is never
    /// exceeded. A low-precision parameter has a master, so its state is on the host.
    fn place(&mut self, parameters: &[StepParameter<B::InnerBackend>]) {
        if self.on_device.is_some() {
            return;
        }
        let ratio = self.config.ratio;
        let elements = |known: &StepParameter<B::InnerBackend>| known.value.shape().num_elements();
        let total: usize = parameters.iter().map(elements).sum();
        let mut room = ((1.0 - ratio) * total as f64) as usize;
        let stay = parameters.iter().filter(|parameter| {
            let (elements, dtype) = (elements(parameter), parameter.value.dtype());
            let is_low = matches!(dtype, DType::BF16 | DType::F16);
            let fits = elements <= room && !is_low && ratio < 1.0;
            room -= if fits { elements } else { 0 };
            fits
        });
        self.on_device = Some(stay.map(|parameter| parameter.id).collect());
    }

    fn is_on_device(&self, id: ParamId) -> bool {
        let on_device = self.on_device.as_ref();
        on_device.is_some_and(|ids| ids.contains(&id))
    }

    /// From now on gradients of parameters whose state is on the host are copied there during backward.
    fn attach<M: AutodiffModule<B>>(&mut self, module: &M) -> Result<(), OffloadError> {
        let mut link = core::mem::take(&mut self.link);
        let bucket_elements = self.config.bucket_elements;
        let attached = link.attach::<B, M>(module, bucket_elements, |id| !self.is_on_device(*id));
        self.link = link;
        Ok(attached?)
    }

    /// # Errors
    ///
    /// If a step cannot update this parameter.
    fn check(&self, parameter: &StepParameter<B::InnerBackend>) -> Result<(), OffloadError> {
        let dtype = parameter.value.dtype();
        let on_host = matches!(dtype, DType::F32 | DType::BF16 | DType::F16);
        if !on_host && !self.is_on_device(parameter.id) {
            let path = parameter.path.clone();
            return Err(OffloadError::UnsupportedDtype { path, dtype });
        }
        let state = self.states.get(&parameter.id);
        let mut shapes = state.into_iter().flat_map(State::shapes);
        shapes.try_for_each(|shape| parameter.check_shape("the optimizer's state", &shape))
    }

    fn advance<M: AutodiffModule<B>>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, OffloadError> {
        let args = self.config.adamw.at(lr);
        args.validate()?;
        let mut parameters = self.link.parameters::<B, M>(&module, gradients)?;
        self.place(&parameters);
        parameters.retain(|parameter| parameter.gradient.is_some());
        parameters.iter().try_for_each(|known| self.check(known))?;

        let mut devices = HashMap::new();
        let mut on_device = HashMap::new();
        let mut downloads = Downloads::<B::InnerBackend> {
            waiting: VecDeque::new(),
            underway: HashMap::new(),
            staging: self.config.staging,
        };
        for mut parameter in parameters {
            devices.insert(parameter.id, parameter.device.clone());
            if self.is_on_device(parameter.id) {
                on_device.insert(parameter.id, parameter);
            } else {
                let state = self.states.get(&parameter.id);
                parameter.is_known &= matches!(state, Some(State::Host(_)));
                downloads.waiting.push_back(parameter);
            }
        }
        let (config, states) = (&self.config.adamw, &mut self.states);
        let burns = burns(config);
        let module = self.link.update(module, devices, |id, old| {
            let state = states.remove(&id);
            let (state, value) = match on_device.remove(&id) {
                Some(parameter) => {
                    let (state, new) = on_device_step(&burns, lr, old, parameter, state);
                    (State::Device(state), NewValue::Device(new))
                }
                None => {
                    drop(old);
                    let (state, new) = raise(downloads.take(id).step(state, config, args));
                    (State::Host(Arc::new(state)), NewValue::Host(new))
                }
            };
            states.insert(id, state);
            value
        });
        self.attach(&module)?;
        Ok(module)
    }
}

/// Parameters that are updated on the host, in the order of the module, of which a limited number are being downloaded.
struct Downloads<I: Backend> {
    waiting: VecDeque<StepParameter<I>>,
    underway: HashMap<ParamId, Download>,
    staging: usize,
}

struct Download {
    path: String,
    /// The parameter, if the host has no current copy.
    value: Option<HostRead>,
    gradient: HostRead,
}

impl<I: Backend> Downloads<I> {
    /// Takes a parameter's download, whatever the order in which the module is mapped.
    fn take(&mut self, id: ParamId) -> Download {
        while self.underway.len() < self.staging || !self.underway.contains_key(&id) {
            let Some(parameter) = self.waiting.pop_front() else {
                break;
            };
            let gradient = parameter.gradient.expect("those without are not updated");
            let value = (!parameter.is_known).then_some(parameter.value);
            let download = Download {
                path: parameter.path,
                value: value.map(HostRead::start::<I>),
                gradient: HostRead::start::<I>(gradient),
            };
            self.underway.insert(parameter.id, download);
        }
        let download = self.underway.remove(&id);
        download.expect("what is not updated on the device is downloaded")
    }
}

impl Download {
    /// Waits for the download, and updates. Returns the new state and value.
    ///
    /// # Errors
    ///
    /// [`OffloadError::Parameter`].
    fn step<I: Backend>(
        self,
        state: Option<State<I>>,
        config: &HostAdamWConfig,
        args: AdamWStep,
    ) -> Result<(HostState, TensorData), OffloadError> {
        let path = self.path;
        let value = self.value.map(HostRead::data);
        let gradient = self.gradient.data();
        if !is_finite(&gradient) {
            log::warn!(
                "{path}: the gradient is not finite, and so will be its moments: skip such steps with a loss scaler"
            );
        }
        let updated = HostState::new(state, value, config, &path).and_then(|mut state| {
            let value = state.update(args, gradient)?;
            Ok((state, value))
        });
        updated.map_err(|source| OffloadError::Parameter {
            path,
            source: Box::new(source),
        })
    }
}

/// Burn's AdamW with this configuration, in f32.
fn burns(config: &HostAdamWConfig) -> AdamW {
    AdamWConfig::new()
        .with_beta_1(config.beta_1 as f32)
        .with_beta_2(config.beta_2 as f32)
        .with_epsilon(config.epsilon as f32)
        .with_weight_decay(config.weight_decay as f32)
        .with_cautious_weight_decay(config.decay_mode == DecayMode::Cautious)
        .build()
}

/// A step of Burn's AdamW: the new state and value. It is elementwise, so the number of dimensions of its tensors does not matter.
fn on_device_step<I: Backend>(
    burns: &AdamW,
    lr: LearningRate,
    old: FloatTensor<I>,
    parameter: StepParameter<I>,
    state: Option<State<I>>,
) -> (AdamWState<I, 1>, FloatTensor<I>) {
    let tensor = |primitive| Tensor::<I, 1>::from_primitive(TensorPrimitive::Float(primitive));
    let StepParameter {
        gradient, device, ..
    } = parameter;
    let gradient = gradient.expect("those without are not updated");
    let dtype = gradient.dtype();
    let state = state.map(|state| match state {
        State::Device(state) => state,
        state => {
            let momentum = &state.save().momentum;
            let [moment_1, moment_2] = [&momentum.moment_1, &momentum.moment_2].map(|data| {
                tensor(I::float_from_data(
                    data.clone().convert_dtype(dtype),
                    &device,
                ))
            });
            AdamWState::new(AdaptiveMomentumState::new(
                momentum.time,
                moment_1,
                moment_2,
            ))
        }
    });
    let old = tensor(old).to_device(&device);
    let (new, state) = burns.step(lr, old, tensor(gradient), state);
    let state = state.expect("AdamW has a state after a step");
    (state, new.into_primitive().tensor())
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizer<M, B> for OffloadedAdamW<B> {
    type Record = OffloadRecord<B::InnerBackend>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        host_step(module, grads, |module, grads| {
            self.advance(lr, module, grads)
        })
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        host_step(module, grads, |module, grads| {
            self.advance(lr, module, grads)
        })
    }

    fn to_record(&self) -> Self::Record {
        OffloadRecord(self.states.clone())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        raise(record.check());
        self.states = record.0;
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
