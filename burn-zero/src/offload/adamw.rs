//! AdamW with its state on the host, as an optimizer of modules.

use core::fmt;
use std::collections::{HashMap, HashSet};

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
use burn_backend::tensor::{Device, FloatTensor};
use burn_decorator::message;

use super::gradients::HostGradients;
use super::parameters::{Leaf, NewValue, StepParameter, check_shape, parameters, update_module};
use super::pipeline::{Downloads, HostState, Start, Update};
use super::record::{DeviceState, OffloadRecord, State};
use super::{DecayMode, HostAdamWConfig, OffloadConfig, OffloadError, raise, shards};

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
    parameters: HashMap<ParamId, Known<B::InnerBackend>>,
    gradients: HostGradients,
}

/// A parameter that has taken a step, or is in a loaded record.
#[derive(Clone)]
struct Known<I: Backend> {
    state: State<I>,
    leaf: Leaf,
}

impl<B: AutodiffBackend> OffloadedAdamW<B> {
    /// An optimizer before its first step: see [`OffloadConfig::init`].
    pub(super) fn new(config: OffloadConfig) -> Result<Self, OffloadError> {
        config.validate()?;
        Ok(Self {
            config,
            on_device: None,
            parameters: HashMap::new(),
            gradients: HostGradients::default(),
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
        let parameters = raise(parameters::<B, M>(module, GradientsParams::new().into()));
        self.place(&parameters);
        raise(self.attach(module));
    }

    /// Elements whose state is on the host and on the device, of parameters that have taken a step.
    pub fn elements(&self) -> (usize, usize) {
        self.count(
            |state| state.adamw.len(),
            |state| state.moment_1.shape().num_elements(),
        )
    }

    /// Bytes of state on the host (masters and moments) and on the device (moments), of parameters that have taken a step: the sizes
    /// of the actual buffers and tensors.
    pub fn state_bytes(&self) -> (usize, usize) {
        self.count(
            |state| 3 * size_of_val(state.adamw.master()),
            |state| 2 * state.moment_1.shape().num_elements() * state.moment_1.dtype().size(),
        )
    }

    /// Sums over parameters on the host and on the device.
    fn count(
        &self,
        on_host: impl Fn(&HostState) -> usize,
        on_device: impl Fn(&DeviceState<B::InnerBackend>) -> usize,
    ) -> (usize, usize) {
        let each = self.parameters.values().map(|known| match &known.state {
            State::Host(state) => (on_host(state), 0),
            State::Device(state) => (0, on_device(state)),
            State::Saved(_) => (0, 0),
        });
        each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Decides once where each parameter's state is.
    fn place(&mut self, parameters: &[StepParameter<B::InnerBackend>]) {
        let ratio = self.config.ratio;
        self.on_device.get_or_insert_with(|| {
            let sizes = parameters.iter().map(|parameter| {
                let is_low = matches!(parameter.dtype(), DType::BF16 | DType::F16);
                (parameter.shape().iter().product(), is_low)
            });
            let stay = stay(&sizes.collect::<Vec<_>>(), ratio);
            let placed = parameters.iter().zip(stay).filter(|(_, stays)| *stays);
            placed.map(|(parameter, _)| parameter.id).collect()
        });
    }

    fn is_on_device(&self, id: ParamId) -> bool {
        self.on_device
            .as_ref()
            .is_some_and(|placed| placed.contains(&id))
    }

    /// From now on gradients of parameters whose state is on the host are copied there during backward.
    fn attach<M: AutodiffModule<B>>(&mut self, module: &M) -> Result<(), OffloadError> {
        let bucket_elements = self.config.bucket_elements;
        let mut gradients = core::mem::take(&mut self.gradients);
        gradients.attach::<B, M>(module, bucket_elements, |id| !self.is_on_device(id))?;
        self.gradients = gradients;
        Ok(())
    }

    /// # Errors
    ///
    /// If a step cannot update this parameter.
    fn check(&self, parameter: &StepParameter<B::InnerBackend>) -> Result<(), OffloadError> {
        let dtype = parameter.dtype();
        if !self.is_on_device(parameter.id)
            && !matches!(dtype, DType::F32 | DType::BF16 | DType::F16)
        {
            let path = parameter.path.clone();
            return Err(OffloadError::UnsupportedDtype { path, dtype });
        }
        let known = self.parameters.get(&parameter.id);
        let mut shapes = known.into_iter().flat_map(|known| known.state.shapes());
        shapes.try_for_each(|shape| check_shape("the optimizer's state", parameter, shape))
    }

    fn advance<M: AutodiffModule<B>>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, OffloadError> {
        let args = self.config.adamw.at(lr);
        args.validate()?;
        let mut parameters = parameters::<B, M>(&module, gradients)?;
        self.place(&parameters);
        parameters.retain(|parameter| parameter.gradient.is_some());
        parameters.iter().try_for_each(|known| self.check(known))?;

        let mut devices = HashMap::new();
        let mut on_device = HashMap::new();
        let mut updates = Vec::new();
        for mut parameter in parameters {
            let Some(gradient) = parameter.gradient.take() else {
                continue;
            };
            devices.insert(parameter.id, parameter.device.clone());
            match self.is_on_device(parameter.id) {
                true => drop(on_device.insert(parameter.id, gradient)),
                false => updates.push(self.update(parameter, gradient)),
            }
        }
        let config = &self.config;
        let burns = burns(&config.adamw);
        let mut downloads = Downloads::<B::InnerBackend>::new(updates, config.staging);
        let module = update_module(module, devices, |id, old, device, leaf| {
            let (state, value) = match on_device.remove(&id) {
                Some(gradient) => {
                    let known = self.parameters.remove(&id).map(|known| known.state);
                    let (new, state) = on_device_step((&burns, lr), old, gradient, known, device);
                    (State::Device(state), NewValue::Device(new))
                }
                None => {
                    drop(old);
                    let update = downloads
                        .take(id)
                        .expect("what is not on the device has one");
                    let (state, value) = raise(update.run(&config.adamw, args));
                    (State::Host(state), NewValue::Host(value))
                }
            };
            self.parameters.insert(id, Known { state, leaf });
            value
        });
        if !shards::are_stepped() {
            self.attach(&module)?;
        }
        Ok(module)
    }

    /// The update of a parameter on the host.
    fn update(
        &mut self,
        parameter: StepParameter<B::InnerBackend>,
        gradient: FloatTensor<B::InnerBackend>,
    ) -> Update<FloatTensor<B::InnerBackend>> {
        let known = self.parameters.remove(&parameter.id);
        let is_made_here = known
            .as_ref()
            .is_some_and(|known| parameter.is(&known.leaf));
        Update {
            id: parameter.id,
            path: parameter.path,
            start: match known.map(|known| known.state) {
                Some(State::Host(state)) => Start::Known(state),
                Some(state) => Start::Saved(state.save()),
                None => Start::New,
            },
            value: (!is_made_here).then_some(parameter.value),
            gradient,
        }
    }
}

/// Which parameters' state stays on the device, given their elements and whether they have low precision: in order, those that fit
/// into the device's part, which is never exceeded. A low-precision parameter has a master, so its state is on the host.
fn stay(parameters: &[(usize, bool)], ratio: f64) -> Vec<bool> {
    let total: usize = parameters.iter().map(|(elements, _)| elements).sum();
    let mut room = ((1.0 - ratio) * total as f64) as usize;
    let fits = parameters.iter().map(|&(elements, is_low)| {
        let fits = elements <= room && !is_low && ratio < 1.0;
        room -= if fits { elements } else { 0 };
        fits
    });
    fits.collect()
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

/// A step of Burn's AdamW. It is elementwise, so its tensors are used flat.
fn on_device_step<I: Backend>(
    (burns, lr): (&AdamW, LearningRate),
    parameter: FloatTensor<I>,
    gradient: FloatTensor<I>,
    state: Option<State<I>>,
    device: &Device<I>,
) -> (FloatTensor<I>, DeviceState<I>) {
    let tensor = |primitive| Tensor::<I, 1>::from_primitive(TensorPrimitive::Float(primitive));
    let dtype = gradient.dtype();
    let state = state.map(|state| {
        let (time, moments) = match state {
            State::Device(state) => (state.time, [state.moment_1, state.moment_2]),
            state => {
                let momentum = &state.save().momentum;
                let moments = [&momentum.moment_1, &momentum.moment_2];
                let upload = |data: &TensorData| {
                    I::float_from_data(data.clone().convert_dtype(dtype), device)
                };
                (momentum.time, moments.map(upload))
            }
        };
        let [moment_1, moment_2] = moments.map(tensor);
        AdamWState::new(AdaptiveMomentumState::new(time, moment_1, moment_2))
    });
    let parameter = tensor(parameter).to_device(device);
    let (parameter, state) = burns.step(lr, parameter, tensor(gradient), state);
    let momentum = state.expect("AdamW has a state after a step").momentum;
    let state = DeviceState {
        time: momentum.time,
        moment_1: momentum.moment_1.into_primitive().tensor(),
        moment_2: momentum.moment_2.into_primitive().tensor(),
    };
    (parameter.into_primitive().tensor(), state)
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
        let states = self.parameters.iter();
        let states = states.map(|(id, known)| (*id, known.state.clone()));
        OffloadRecord(states.collect())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        raise(record.check());
        let known = record.0.into_iter().map(|(id, state)| {
            let leaf = Leaf::default();
            (id, Known { state, leaf })
        });
        self.parameters = known.collect();
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::stay;

    fn full(elements: &[usize]) -> Vec<(usize, bool)> {
        elements.iter().map(|&elements| (elements, false)).collect()
    }

    #[test]
    fn the_first_that_fit_stay_and_what_has_a_master_does_not() {
        assert_eq!(stay(&full(&[4, 8, 3, 1]), 0.5), [true, false, true, true]);
        assert_eq!(stay(&full(&[4, 8]), 1.0), [false, false]);
        assert_eq!(stay(&full(&[4, 0, 8]), 0.0), [true, true, true]);
        assert!(stay(&[], 0.5).is_empty());
        let low_first = [(4, true), (8, false), (3, false)];
        assert_eq!(stay(&low_first, 0.0), [false, true, true]);
    }

    proptest! {
        #[test]
        fn the_device_gets_no_more_than_its_part_and_misses_less_than_one_parameter(
            elements in prop::collection::vec(0_usize..1000, 0..20),
            ratio in 0.0_f64..=1.0,
        ) {
            let part = ((1.0 - ratio) * elements.iter().sum::<usize>() as f64) as usize;
            let stays = stay(&full(&elements), ratio);
            let of = |stay: bool| elements.iter().zip(&stays).filter(move |(_, stays)| **stays == stay).map(|(e, _)| *e);
            let held: usize = of(true).sum();
            prop_assert!(held <= part);
            if let Some(left) = of(false).min() && ratio < 1.0 {
                prop_assert!(held + left > part);
            }
        }
    }
}
