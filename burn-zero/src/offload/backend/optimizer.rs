//! The optimizer: a step of a module, on the host's backend.

use core::any::Any;
use core::fmt;
use std::collections::HashMap;
use std::sync::Arc;

use burn::module::{AutodiffModule, ModuleMapper, Param, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::AutodiffBackend};
use burn_autodiff::Autodiff;
use burn_backend::Backend;
use burn_backend::tensor::{Device, FloatTensor};
use burn_decorator::message;

use super::record::HostRecord;
use crate::host::HostRead;
use crate::offload::arrivals::{Arrival, Gradient, arrivals};
use crate::offload::landing::Landing;
use crate::offload::leaves::Leaves;
use crate::offload::marks::{Mark, differ};
use crate::offload::uploads::will_be_gathered;
use crate::offload::{OffloadError, raise};
use crate::optimizer::MOST_DIMENSIONS;
use crate::{ParameterShards, ZeroSettings};

/// Puts `optimizer`, any of Burn's, on the host's backend `H`: see [`HostOffload`].
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{GradientsParams, MuonConfig, Optimizer}, prelude::*};
/// use burn_flex::Flex;
/// use burn_zero::offload;
///
/// type B = Autodiff<Flex>; // or Autodiff<Cuda>
/// let device = Default::default();
/// let mut model: nn::Linear<B> = nn::LinearConfig::new(4, 3).with_bias(false).init(&device);
///
/// let mut optimizer = offload::<Flex, _>(MuonConfig::new().init());
/// let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).square().mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// model = optimizer.step(1e-2, model, gradients);
/// # let _ = model;
/// ```
pub fn offload<H, O>(optimizer: O) -> HostOffload<H, O>
where
    H: Backend,
    O: Optimizer<ParameterShards<Autodiff<H>>, Autodiff<H>>,
{
    HostOffload::new(optimizer)
}

/// An optimizer of Burn that runs on the host, with all of its state, on the backend `H`: SGD, Muon, RMSprop and the rest.
/// AdamW has a faster one: [`OffloadedAdamW`](crate::OffloadedAdamW).
///
/// Gradients go to the host and parameters come back, in their own types. The numbers are the wrapped optimizer's on `H`: bit
/// for bit those on the device where that is the same backend. It meets the parameters as [`ParameterShards`], with the ids that the
/// module gives them, and all of a step at once, so that it may clip by the norm of all.
///
/// A clone has its own state. Parameters that are changed between steps are noticed by their sums, as by
/// [`OffloadedAdamW`](crate::OffloadedAdamW#who-else-changes-state-and-parameters); those on the host are no state, and in no
/// record.
///
/// # Panics
///
/// A step panics with the message of an [`OffloadError`]: [`TooManyDimensions`](OffloadError::TooManyDimensions),
/// [`OtherShape`](OffloadError::OtherShape); nothing has changed then.
///
/// # Cost
///
/// The parameters and the optimizer's state in host memory. A step moves each gradient down and each parameter up, and the
/// first step each parameter down; all downloads are under way before the first is waited for, and all uploads come after
/// the update. On a [`Sharded`](crate::Sharded) backend gradients go down during backward already.
pub struct HostOffload<H: Backend, O> {
    inner: O,
    parameters: HashMap<ParamId, Kept<H>>,
    landing: Landing,
}

/// A parameter that the host knows.
struct Kept<H: Backend> {
    value: FloatTensor<H>,
    /// As it was uploaded: a [`Mark`] of the training backend, which a step only knows. `None` if the host is to look anew.
    mark: Option<Arc<dyn Any + Send + Sync>>,
}

impl<H: Backend> Clone for Kept<H> {
    fn clone(&self) -> Self {
        Self {
            value: self.value.clone(),
            mark: self.mark.clone(),
        }
    }
}

impl<H: Backend, O: Clone> Clone for HostOffload<H, O> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            parameters: self.parameters.clone(),
            landing: self.landing.clone(),
        }
    }
}

impl<H: Backend, O> HostOffload<H, O> {
    /// Puts `inner` on the host's backend.
    pub fn new(inner: O) -> Self {
        Self {
            inner,
            parameters: HashMap::new(),
            landing: Landing::default(),
        }
    }

    /// The wrapped optimizer.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Gives the wrapped optimizer back, with its state.
    pub fn into_inner(self) -> O {
        self.inner
    }

    /// Bytes of the parameters that the host keeps beside the optimizer's state.
    pub fn parameter_bytes(&self) -> usize {
        let kept = self.parameters.values().map(|kept| &kept.value);
        kept.map(|value| value.shape().num_elements() * value.dtype().size())
            .sum()
    }

    /// Makes the next step take over the parameters of the module that it gets: after a change that no sum shows.
    pub fn follow(&mut self) {
        self.parameters.clear();
    }

    /// Makes the gradients of a model leave the device in its first backward pass too: as
    /// [`OffloadedAdamW::prepare`](crate::OffloadedAdamW::prepare).
    pub fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) {
        raise(self.look_out::<B, M>(module));
    }

    fn look_out<B, M>(&mut self, module: &M) -> Result<(), OffloadError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let bucket_elements = ZeroSettings::default().bucket_elements;
        let landing = &mut self.landing;
        Ok(landing.look_out::<B, M>(module, bucket_elements, |_| true)?)
    }

    fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, OffloadError>
    where
        O: Optimizer<ParameterShards<Autodiff<H>>, Autodiff<H>>,
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let mut arrivals = arrivals::<B, M>(&module, gradients)?;
        arrivals.retain(|arrival| arrival.gradient.is_some());
        for Arrival { path, shape, .. } in &arrivals {
            if shape.len() > MOST_DIMENSIONS {
                return Err(OffloadError::TooManyDimensions {
                    path: path.clone(),
                    dimensions: shape.len(),
                });
            }
        }

        let mut devices = HashMap::new();
        let changed = self.changed::<B::InnerBackend>(&arrivals);
        let downloads: Vec<_> = arrivals
            .into_iter()
            .zip(changed)
            .filter_map(|(arrival, changed)| {
                let Gradient { tensor, device } = arrival.gradient?;
                devices.insert(arrival.id, device);
                let gradient = HostRead::start::<B::InnerBackend>(tensor);
                let value = changed.then(|| HostRead::start::<B::InnerBackend>(arrival.value));
                Some((arrival.id, value, gradient))
            })
            .collect();

        let here = H::Device::default();
        let upload = |read: HostRead| H::float_from_data(read.data(), &here);
        let mut pieces = Vec::new();
        let mut gradients = GradientsParams::new();
        for (id, value, gradient) in downloads {
            let kept = self.parameters.remove(&id);
            let value = match (value, kept) {
                (Some(value), _) => upload(value),
                (None, Some(kept)) => kept.value,
                (None, None) => unreachable!("what the host does not know was read"),
            };
            pieces.push((id, Autodiff::<H>::from_inner(value)));
            // The container does not know the number of dimensions.
            let gradient = Tensor::<H, 1>::from_primitive(TensorPrimitive::Float(upload(gradient)));
            gradients.register(id, gradient);
        }
        let shards = ParameterShards::with_ids(pieces.into_iter());
        let updated = self.inner.step(lr, shards, gradients).into_ids();
        let updated = updated.map(|(id, piece)| (id, Autodiff::<H>::inner(piece)));

        let mut update = Update::<H, B> {
            updated: updated.collect(),
            devices,
            leaves: Leaves::default(),
            parameters: &mut self.parameters,
        };
        let module = module.map(&mut update);
        if !will_be_gathered() {
            self.look_out::<B, M>(&module)?;
        }
        Ok(module)
    }

    /// Whether the host must see each parameter.
    fn changed<I: Backend>(&self, arrivals: &[Arrival<I>]) -> Vec<bool> {
        let marks = arrivals.iter().map(|arrival| {
            let kept = self.parameters.get(&arrival.id)?;
            let mark = kept.mark.as_ref()?.downcast_ref::<Mark<I>>()?;
            Some(mark.clone())
        });
        differ(arrivals, marks)
    }
}

/// The updated parameters becoming the module's.
struct Update<'a, H: Backend, B: AutodiffBackend> {
    updated: HashMap<ParamId, FloatTensor<H>>,
    devices: HashMap<ParamId, Device<B::InnerBackend>>,
    leaves: Leaves<B>,
    parameters: &'a mut HashMap<ParamId, Kept<H>>,
}

impl<H: Backend, B: AutodiffBackend> ModuleMapper<B> for Update<'_, H, B> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let id = param.id;
        if self.leaves.has(id) {
            return self.leaves.replace(param, |old| old);
        }
        let (Some(value), Some(device)) = (self.updated.remove(&id), self.devices.remove(&id))
        else {
            return param;
        };
        let data = HostRead::start::<H>(value.clone()).data();
        let (param, mark) = self.leaves.renew(param, data, &device);
        let mark: Arc<dyn Any + Send + Sync> = Arc::new(mark);
        let kept = Kept {
            value,
            mark: Some(mark),
        };
        self.parameters.insert(id, kept);
        param
    }
}

impl<H, O, M, B> Optimizer<M, B> for HostOffload<H, O>
where
    H: Backend,
    O: Optimizer<ParameterShards<Autodiff<H>>, Autodiff<H>>,
    M: AutodiffModule<B>,
    B: AutodiffBackend,
{
    type Record = HostRecord<Autodiff<H>, O::Record>;

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
        HostRecord::new(self.inner.to_record())
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record.inner);
        // Weights of the same record may have been loaded too.
        self.parameters.clear();
        self
    }
}

impl<H: Backend, O: fmt::Debug> fmt::Debug for HostOffload<H, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostOffload")
            .field("inner", &self.inner)
            .field("parameters", &self.parameters.len())
            .finish_non_exhaustive()
    }
}
