//! The step: what it refuses, what it orders, and how the updates become the module's parameters.

use std::collections::HashMap;
use std::thread;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::LearningRate;
use burn::optim::adaptor::GradAdaptor;
use burn::tensor::{DType, Tensor, backend::AutodiffBackend};
use burn_backend::tensor::Device;

use super::device;
use super::job::From;
use super::optimizer::{Kept, OffloadedAdamW};
use super::pipeline::{Order, Pipeline};
use super::placement::{Candidate, Placement};
use super::state::{DeviceState, Entry};
use crate::offload::OffloadError;
use crate::offload::arrivals::{Arrival, Gradient, arrivals};
use crate::offload::leaves::Leaves;
use crate::offload::marks::differ;
use crate::offload::uploads::will_be_gathered;

impl<B: AutodiffBackend> OffloadedAdamW<B> {
    pub(super) fn advance<M: AutodiffModule<B>>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, OffloadError> {
        let args = self.config.adamw.at(lr);
        args.validate()?;
        let arrivals = arrivals::<B, M>(&module, gradients)?;
        self.place(&arrivals);
        let placement = self.placement.as_ref();
        let (on_device, on_host): (Vec<_>, Vec<_>) = arrivals
            .into_iter()
            .filter(|arrival| arrival.gradient.is_some())
            .partition(|arrival| placement.is_some_and(|placed| placed.is_on_device(arrival.id)));
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
        let module = thread::scope(|scope| {
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
        })?;
        if !will_be_gathered() {
            self.look_out(&module)?;
        }
        Ok(module)
    }

    /// Decides once where each parameter's state is.
    pub(super) fn place(&mut self, arrivals: &[Arrival<B::InnerBackend>]) {
        let ratio = self.config.ratio;
        self.placement.get_or_insert_with(|| {
            let all = arrivals.iter().map(|arrival| Candidate {
                id: arrival.id,
                elements: arrival.elements(),
                is_full_precision: !matches!(arrival.dtype, DType::BF16 | DType::F16),
            });
            Placement::new(&all.collect::<Vec<_>>(), ratio)
        });
    }

    /// From now on the gradients of what is on the host go there during backward.
    pub(super) fn look_out<M: AutodiffModule<B>>(
        &mut self,
        module: &M,
    ) -> Result<(), OffloadError> {
        let placed = self.placement.as_ref();
        let is_on_host = |id| !placed.is_some_and(|placed| placed.is_on_device(id));
        let bucket_elements = self.config.bucket_elements;
        let landing = &mut self.landing;
        Ok(landing.look_out::<B, M>(module, bucket_elements, is_on_host)?)
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
        let (param, mark) = self.leaves.renew(param, done.value, &device);
        let kept = Kept {
            state: done.state,
            mark: Some(mark),
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
