//! AdamW with its state on the host, as an optimizer of modules.
//!
//! While one parameter is updated, the gradients of the next are downloaded and the last one is
//! uploaded:
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
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{TensorData, TensorMetadata, backend::AutodiffBackend};
use burn_backend::Backend;
use burn_decorator::HostRead;
use burn_decorator::simulated::values_are_simulated;

use super::host_state::{HostState, OffloadRecord, State};
use super::parameters::{HostLink, StepParameter};
use super::{HostAdamWConfig, OffloadConfig, not_negative};
use crate::error::{ShardingFault, ZeroError, raise};
use crate::host::{exchanged, is_finite, not_read};
use crate::state::refuse;

/// AdamW whose moments and f32 master parameters live in host memory and are updated there
/// (ZeRO-Offload, Ren et al., arXiv 2101.06840; DeepSpeed's `offload_optimizer`).
///
/// An `Optimizer` of Burn for any module on any autodiff backend, alone or in an
/// [update over ranks](crate::ReduceOverRanks), where each rank's host holds that rank's shard.
/// Gradients are downloaded and parameters uploaded in their own types: f32, bf16 or f16. Results
/// are those of [`HostAdamW`](crate::HostAdamW), which are PyTorch's up to f32 rounding.
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::{HostAdamWConfig, OffloadConfig};
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let mut model: nn::Linear<B> = nn::LinearConfig::new(4, 1).init(&device);
///
/// let mut optimizer = OffloadConfig::new(HostAdamWConfig::default()).init()?;
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
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// # Clones, and weights changed outside of steps
///
/// Clones share state until one of them steps, which copies it first.
///
/// Weights that are loaded, clamped or averaged between steps are new leaves of the autodiff graph.
/// The next step downloads them, and they become the masters, unless the masters round to them. On
/// a backend that does not expose its leaves (neither `Autodiff` nor with
/// [`Sharded`](crate::Sharded) in it) each step downloads all parameters.
///
/// A parameter without gradient in a step is not updated, as in Burn. An infinite or NaN gradient
/// makes the moments non-finite, as in Burn and PyTorch; a warning in the log names the parameter.
///
/// # Panics
///
/// A step panics with the message of a [`ZeroError`]:
/// [`UnsupportedDtype`](ShardingFault::UnsupportedDtype),
/// [`OtherModel`](ShardingFault::OtherModel), [`InvalidSetting`](ZeroError::InvalidSetting)
/// for a learning rate that is negative or not finite, before anything has changed; and if the host
/// has no memory for a parameter's state, with the parameter's path. Loading a record of AMSGrad
/// panics too.
///
/// # Cost
///
/// 12 bytes of host memory an element, and on a [`Sharded`](crate::Sharded) backend 4 for its
/// gradient. On the device: during backward three [buckets](OffloadConfig::bucket_elements) of
/// gradients, and during a step three parameters in transfer (one downloaded, one updated, one
/// uploaded); on other backends all gradients until the step. Backward downloads each gradient, a
/// step uploads each parameter, and the first step also downloads each; the update of a parameter
/// overlaps with the transfers of its neighbours. In an update over ranks
/// updated shards stay in host memory, are gathered from there, and are uploaded with those of all
/// ranks.
#[derive(Clone)]
pub struct OffloadedAdamW {
    config: OffloadConfig,
    /// Of parameters that have taken a step, or are in a loaded record.
    states: HashMap<ParamId, State>,
    link: HostLink,
}

/// Parameters in transfer at once: downloaded, updated, uploaded.
const STAGING: usize = 3;

impl OffloadedAdamW {
    /// An optimizer before its first step: see [`OffloadConfig::init`].
    pub(super) fn new(config: OffloadConfig) -> Self {
        Self {
            config,
            states: HashMap::new(),
            link: HostLink::default(),
        }
    }

    /// Makes the gradients of a model leave the device in its first backward pass; a step does so
    /// for the model that it returns. To be called on the thread that trains. Has no effect on a
    /// backend that is not [`Sharded`](crate::Sharded), nor in an
    /// [update over ranks](crate::ReduceOverRanks), whose own
    /// [`prepare`](burn_update::Update::prepare) does it.
    pub fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) {
        raise(self.attach::<B, M>(module, &HashSet::new()));
    }

    /// [`prepare`](Self::prepare), after a step that has updated some parameters.
    fn attach<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        module: &M,
        updated: &HashSet<ParamId>,
    ) -> Result<(), ZeroError> {
        let bucket_elements = self.config.bucket_elements;
        self.link.attach::<B, M>(module, bucket_elements, updated)
    }

    /// Elements whose state is on the host, of parameters that have taken a step.
    pub fn elements(&self) -> usize {
        let states = self.states.values();
        states.map(State::elements).sum()
    }

    /// Bytes of state on the host (masters and moments), of parameters that have taken a step.
    pub fn state_bytes(&self) -> usize {
        3 * size_of::<f32>() * self.elements()
    }

    /// # Errors
    ///
    /// If a step cannot update this parameter.
    fn check<I: Backend>(&self, parameter: &StepParameter<I>) -> Result<(), ShardingFault> {
        let dtype = parameter.value.dtype();
        if exchanged(dtype).is_none() {
            let path = parameter.path.clone();
            return Err(ShardingFault::UnsupportedDtype { path, dtype });
        }
        let state = self.states.get(&parameter.id);
        let mut shapes = state.into_iter().flat_map(State::shapes);
        shapes.try_for_each(|shape| parameter.check_shape("the optimizer's state", &shape))
    }

    fn advance<B: AutodiffBackend, M: AutodiffModule<B>>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, ZeroError> {
        not_negative("learning_rate", lr)?;
        if !values_are_simulated() {
            // What was made when this optimizer was estimated.
            self.states.retain(|_, state| state.has_values());
        }
        let mut parameters = self.link.parameters::<B, M>(&module, gradients)?;
        parameters.iter().try_for_each(|known| self.check(known))?;
        let updated = parameters.iter().map(|it| it.id).collect();
        for parameter in &mut parameters {
            let state = self.states.get(&parameter.id);
            parameter.is_known &= matches!(state, Some(State::Host(_)));
        }
        let (mut waiting, mut underway) = (parameters.into_iter(), VecDeque::new());
        let (config, states) = (&self.config.adamw, &mut self.states);
        let module = self.link.update(module, &updated, |id| {
            let free = STAGING - underway.len();
            underway.extend(waiting.by_ref().take(free).map(Download::start));
            let next = underway.pop_front().filter(|next| next.id == id);
            let next = next.expect("a module is visited and mapped in one order");
            let (state, value) = raise(next.step(states.remove(&id), config, lr));
            states.insert(id, State::Host(Arc::new(state)));
            value
        });
        self.attach::<B, M>(&module, &updated)?;
        Ok(module)
    }
}

/// A parameter that is being downloaded.
struct Download {
    id: ParamId,
    path: String,
    /// The parameter, if the host has no current copy.
    value: Option<HostRead>,
    gradient: HostRead,
}

impl Download {
    fn start<I: Backend>(parameter: StepParameter<I>) -> Self {
        let value = (!parameter.is_known).then_some(parameter.value);
        Self {
            id: parameter.id,
            path: parameter.path,
            value: value.map(HostRead::start::<I>),
            gradient: HostRead::start::<I>(parameter.gradient),
        }
    }

    /// Waits for the download, and updates. Returns the new state and value.
    ///
    /// # Errors
    ///
    /// [`ZeroError::Read`]; [`ShardingFault::State`], with the path.
    fn step(
        self,
        state: Option<State>,
        config: &HostAdamWConfig,
        learning_rate: f64,
    ) -> Result<(HostState, TensorData), ZeroError> {
        let path = self.path;
        let read =
            |read: HostRead, what| read.wait().map_err(|error| not_read(what, &path, &error));
        let downloaded = self.value.map(|value| read(value, "the value"));
        let value = downloaded.transpose()?;
        let gradient = read(self.gradient, "the gradient")?;
        if values_are_simulated() {
            // An estimate of a large model has no memory for its state.
            let state = HostState::without_values(config, &gradient)?;
            return Ok((state, gradient));
        }
        if !is_finite(&gradient) {
            burn_decorator::warn_user!(
                "{path}: the gradient is not finite, and so will be its moments: skip such steps with a loss scaler"
            );
        }
        let updated = HostState::new(state, value, config, &path).and_then(|mut state| {
            let value = state.update(learning_rate, gradient)?;
            Ok((state, value))
        });
        Ok(updated.map_err(|error| refuse(format!("{path}: {error}")))?)
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizer<M, B> for OffloadedAdamW {
    type Record = OffloadRecord;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
        raise(self.advance(lr, module, grads.into()))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        raise(self.advance(lr, module, grads.into()))
    }

    fn to_record(&self) -> Self::Record {
        OffloadRecord(self.states.clone())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.states = record.0;
        self
    }
}

impl fmt::Debug for OffloadedAdamW {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OffloadedAdamW")
            .field("config", &self.config)
            .field("elements", &self.elements())
            .finish_non_exhaustive()
    }
}
