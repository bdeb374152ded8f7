//! The optimizer: a step of a module.

use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{AdamW, GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{DType, Tensor, TensorPrimitive, backend::AutodiffBackend};
use burn_backend::Backend;
use burn_backend::ops::FloatTensorOps;
use burn_backend::tensor::Device;

use super::device;
use super::pipeline::{From, Order, Pipeline};
use super::placement::{Candidate, Placement};
use super::record::OffloadRecord;
use super::state::{DeviceState, Entry, HostState};
use crate::offload::arrivals::{Arrival, Gradient, arrivals};
use crate::offload::leaves::Leaves;
use crate::offload::marks::{Mark, differ};
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
/// 12 bytes of host memory an element. Of the device: nothing but a number a parameter, and during a step
/// [`staging`](OffloadConfig::staging) parameters on their way. A step moves each gradient down and each parameter up,
/// the first step each parameter down; updating a parameter overlaps with the download of the next and the upload of the last.
pub struct OffloadedAdamW<B: AutodiffBackend> {
    config: OffloadConfig,
    burns: AdamW,
    placement: Option<Placement>,
    host: HashMap<ParamId, Kept<B::InnerBackend>>,
    device: HashMap<ParamId, DeviceState<B::InnerBackend>>,
    /// From a record, until their first steps.
    loaded: HashMap<ParamId, Entry<B::InnerBackend>>,
}

/// A parameter that the host knows.
struct Kept<I: Backend> {
    state: Arc<HostState>,
    /// The parameter as it was uploaded; `None` if the host is to look anew.
    mark: Option<Mark<I>>,
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

    /// Elements whose state is on the host and on the device.
    pub fn elements(&self) -> (usize, usize) {
        use burn::tensor::TensorMetadata;
        let host = self.host.values().map(|kept| kept.state.adamw.len()).sum();
        let device = self.device.values();
        let device = device.map(|state| state.moment_1.shape().num_elements());
        (host, device.sum())
    }

    fn advance<M: AutodiffModule<B>>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, OffloadError> {
        let args = self.config.adamw.at(lr);
        args.validate()?;
        let arrivals = arrivals::<B, M>(&module, gradients)?;
        let ratio = self.config.ratio;
        let placement = self.placement.get_or_insert_with(|| {
            let all = arrivals.iter().map(|arrival| Candidate {
                id: arrival.id,
                elements: arrival.elements(),
                is_full_precision: !matches!(arrival.dtype, DType::BF16 | DType::F16),
            });
            Placement::new(&all.collect::<Vec<_>>(), ratio)
        });
        let (on_device, on_host): (Vec<_>, Vec<_>) = arrivals
            .into_iter()
            .filter(|arrival| arrival.gradient.is_some())
            .partition(|arrival| placement.is_on_device(arrival.id));
        for arrival in on_device.iter().chain(&on_host) {
            self.check(arrival)?;
        }

        let on_device: HashMap<_, _> = on_device
            .into_iter()
            .filter_map(|arrival| Some((arrival.id, arrival.gradient?)))
            .collect();
        let mut devices = HashMap::new();
        let orders = self.orders(on_host, &mut devices);
        let config = self.config.clone();
        thread::scope(|scope| {
            let pipeline = Pipeline::start(scope, orders, config.staging, &config.adamw, args);
            let mut update = Update {
                optimizer: self,
                lr,
                leaves: Leaves::default(),
                devices,
                on_device,
                pipeline,
                failed: None,
            };
            let module = module.map(&mut update);
            update.failed.map_or(Ok(module), Err)
        })
    }

    /// # Errors
    ///
    /// What a step refuses of a parameter with a gradient.
    fn check(&self, arrival: &Arrival<B::InnerBackend>) -> Result<(), OffloadError> {
        let Arrival { path, dtype, .. } = arrival;
        let placed = self.placement.as_ref();
        let on_device = placed.is_some_and(|placement| placement.is_on_device(arrival.id));
        if !on_device && !matches!(dtype, DType::F32 | DType::BF16 | DType::F16) {
            return Err(OffloadError::UnsupportedDtype {
                path: path.clone(),
                dtype: *dtype,
            });
        }
        let saved = self.loaded.get(&arrival.id).map(Entry::shapes);
        let going = self
            .host
            .get(&arrival.id)
            .map(|kept| vec![kept.state.shape.clone()]);
        let known = saved.into_iter().chain(going).flatten();
        match known.into_iter().find(|shape| *shape != arrival.shape) {
            None => Ok(()),
            Some(found) => Err(OffloadError::OtherShape {
                what: "the optimizer's state",
                path: path.clone(),
                found,
                expected: arrival.shape.clone(),
            }),
        }
    }

    /// The updates of parameters on the host, and where those go.
    fn orders(
        &mut self,
        arrivals: Vec<Arrival<B::InnerBackend>>,
        devices: &mut HashMap<ParamId, Device<B::InnerBackend>>,
    ) -> Vec<Order<B::InnerBackend>> {
        let changed = self.changed(&arrivals);
        let orders = arrivals
            .into_iter()
            .zip(changed)
            .filter_map(|(arrival, changed)| {
                let Gradient { tensor, device } = arrival.gradient?;
                devices.insert(arrival.id, device);
                let from = match (
                    self.loaded.remove(&arrival.id),
                    self.host.remove(&arrival.id),
                ) {
                    (Some(Entry::Host(state)), _) => From::Going(state),
                    (Some(entry), _) => From::Saved(Box::new(entry.save())),
                    (None, Some(kept)) => From::Going(kept.state),
                    (None, None) => From::Nothing,
                };
                Some(Order {
                    id: arrival.id,
                    path: arrival.path,
                    from,
                    value: changed.then_some(arrival.value),
                    gradient: tensor,
                })
            });
        orders.collect()
    }

    /// Whether the host must see each parameter: before its first step too.
    fn changed(&self, arrivals: &[Arrival<B::InnerBackend>]) -> Vec<bool> {
        let marks = arrivals.iter().map(|arrival| {
            let loaded = self.loaded.contains_key(&arrival.id);
            let kept = self.host.get(&arrival.id).filter(|_| !loaded)?;
            kept.mark.clone()
        });
        differ(arrivals, marks)
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

/// The updates becoming the module's parameters.
struct Update<'a, B: AutodiffBackend> {
    optimizer: &'a mut OffloadedAdamW<B>,
    lr: LearningRate,
    leaves: Leaves<B>,
    devices: HashMap<ParamId, Device<B::InnerBackend>>,
    on_device: HashMap<ParamId, Gradient<B::InnerBackend>>,
    pipeline: Pipeline<B::InnerBackend>,
    failed: Option<OffloadError>,
}

impl<B: AutodiffBackend> Update<'_, B> {
    fn on_host<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D>>,
        device: Device<B>,
    ) -> Param<Tensor<B, D>> {
        let id = param.id;
        let done = match self.pipeline.take(id) {
            Ok(done) => done.expect("what has a device was ordered"),
            Err(error) => {
                self.failed = Some(error);
                return param;
            }
        };
        let mut mark = None;
        let param = self.leaves.replace(param, |old| {
            drop(old);
            let value = B::InnerBackend::float_from_data(done.value, &device);
            mark = Some(Mark::of(value.clone()));
            Tensor::from_primitive(TensorPrimitive::Float(value))
        });
        let kept = Kept {
            state: done.state,
            mark,
        };
        self.optimizer.host.insert(id, kept);
        param
    }

    fn on_device<const D: usize>(
        &mut self,
        param: Param<Tensor<B, D>>,
        gradient: Gradient<B::InnerBackend>,
    ) -> Param<Tensor<B, D>> {
        let id = param.id;
        let Gradient { tensor, device } = gradient;
        let optimizer = &mut *self.optimizer;
        let state = match optimizer.loaded.remove(&id) {
            Some(Entry::Device(state)) => Some(state),
            Some(entry) => Some(DeviceState::from_saved(entry.save(), &tensor, &device)),
            None => optimizer.device.remove(&id),
        };
        self.leaves.replace(param, |old| {
            let (new, state) = device::step(
                &optimizer.burns,
                self.lr,
                old.to_device(&device),
                tensor,
                state,
            );
            optimizer.device.insert(id, state);
            new
        })
    }
}

impl<B: AutodiffBackend> ModuleMapper<B> for Update<'_, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        if self.failed.is_some() {
            return param;
        }
        if self.leaves.has(param.id) {
            return self.leaves.replace(param, |old| old);
        }
        if let Some(gradient) = self.on_device.remove(&param.id) {
            return self.on_device(param, gradient);
        }
        match self.devices.remove(&param.id) {
            Some(device) => self.on_host(param, device),
            None => param,
        }
    }
}

impl<B: AutodiffBackend, M: AutodiffModule<B>> Optimizer<M, B> for OffloadedAdamW<B> {
    type Record = OffloadRecord<B::InnerBackend>;

    fn step(&mut self, lr: LearningRate, module: M, grads: GradientsParams) -> M {
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
