//! Any of Burn's optimizers, on a backend of the host.

use core::fmt;
use core::marker::PhantomData;
use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::adaptor::GradAdaptor;
use burn::optim::{GradientsParams, LearningRate, MultiGradientsParams, Optimizer};
use burn::record::{PrecisionSettings, Record};
use burn::tensor::{Tensor, TensorMetadata, TensorPrimitive, backend::AutodiffBackend};
use burn_autodiff::Autodiff;
use burn_backend::Backend;
use burn_backend::tensor::FloatTensor;

use super::parameters::{HostLink, devices, host_step};
use crate::host::HostRead;
use crate::optimizer::MOST_DIMENSIONS;
use crate::{ParameterShards, ZeroError, ZeroOptimizerError, ZeroSettings, raise};

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
/// A clone has its own state. Parameters that are changed between steps are downloaded as by
/// [`OffloadedAdamW`](crate::OffloadedAdamW#clones-and-weights-changed-outside-of-steps). The host's copies of parameters are not
/// part of the record.
///
/// # Panics
///
/// A step panics with the message of a [`ZeroOptimizerError`]: [`TooManyDimensions`](ZeroOptimizerError::TooManyDimensions),
/// [`OtherModel`](ZeroOptimizerError::OtherModel); nothing has changed then.
///
/// # Cost
///
/// The parameters and the optimizer's state in host memory. A step downloads each gradient and uploads each parameter, and the
/// first step also downloads each parameter; all downloads are started before the first is waited for, and all uploads come after
/// the update. On a [`Sharded`](crate::Sharded) backend gradients are downloaded during backward.
#[derive(Clone)]
pub struct HostOffload<H: Backend, O> {
    inner: O,
    /// The parameters on the host.
    parameters: HashMap<ParamId, FloatTensor<H>>,
    link: HostLink,
}

impl<H: Backend, O> HostOffload<H, O> {
    /// Puts `inner` on the host's backend.
    pub fn new(inner: O) -> Self {
        Self {
            inner,
            parameters: HashMap::new(),
            link: HostLink::default(),
        }
    }

    /// Makes the gradients of a model leave the device in its first backward pass too: as
    /// [`OffloadedAdamW::prepare`](crate::OffloadedAdamW::prepare).
    pub fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(&mut self, module: &M) {
        let bucket_elements = ZeroSettings::default().bucket_elements;
        raise(self.link.attach::<B, M>(module, bucket_elements));
    }

    fn advance<B, M>(
        &mut self,
        lr: LearningRate,
        module: M,
        gradients: GradAdaptor,
    ) -> Result<M, ZeroError>
    where
        O: Optimizer<ParameterShards<Autodiff<H>>, Autodiff<H>>,
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        let parameters = self.link.parameters::<B, M>(&module, gradients)?;
        for parameter in &parameters {
            let dimensions = parameter.value.shape().num_dims();
            if dimensions > MOST_DIMENSIONS {
                let path = parameter.path.clone();
                return Err(ZeroOptimizerError::TooManyDimensions { path, dimensions }.into());
            }
        }

        let devices = devices(&parameters);
        let download = HostRead::start::<B::InnerBackend>;
        let downloads = parameters.into_iter().map(|parameter| {
            let known = self.parameters.remove(&parameter.id);
            let known = known.filter(|_| parameter.is_known);
            let value = known.ok_or_else(|| download(parameter.value));
            (parameter.id, value, download(parameter.gradient))
        });
        let downloads: Vec<_> = downloads.collect();

        let here = H::Device::default();
        let upload = |read: HostRead| H::float_from_data(read.data(), &here);
        let mut values = Vec::new();
        let mut gradients = GradientsParams::new();
        for (id, value, gradient) in downloads {
            let value = value.unwrap_or_else(upload);
            values.push((id, Autodiff::<H>::from_inner(value)));
            // The container does not store the number of dimensions.
            let gradient = TensorPrimitive::Float(upload(gradient));
            gradients.register(id, Tensor::<H, 1>::from_primitive(gradient));
        }
        let shards = ParameterShards::with_ids(values.into_iter());
        let updated = self.inner.step(lr, shards, gradients).into_ids();
        self.parameters
            .extend(updated.map(|(id, value)| (id, Autodiff::<H>::inner(value))));
        let values = &self.parameters;
        let module = self.link.update(module, devices, |id| {
            HostRead::start::<H>(values[&id].clone()).data()
        });
        self.prepare::<B, M>(&module);
        Ok(module)
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
        host_step(module, grads, |it, grads| self.advance(lr, it, grads))
    }

    fn step_multi(&mut self, lr: LearningRate, module: M, grads: MultiGradientsParams) -> M {
        host_step(module, grads, |it, grads| self.advance(lr, it, grads))
    }

    fn to_record(&self) -> Self::Record {
        HostRecord(self.inner.to_record(), PhantomData)
    }

    fn load_record(mut self, record: Self::Record) -> Self {
        self.inner = self.inner.load_record(record.0);
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

/// The record of an optimizer on the host's backend `A`, as a record of any backend: its file is interchangeable with that of the
/// optimizer on the device.
#[derive(Clone, Debug)]
pub struct HostRecord<A, R>(R, PhantomData<fn() -> A>);

impl<A: AutodiffBackend, R: Record<A>, B: Backend> Record<B> for HostRecord<A, R> {
    type Item<S: PrecisionSettings> = R::Item<S>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        self.0.into_item::<S>()
    }

    /// On the host's device, whatever this one is.
    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, _device: &B::Device) -> Self {
        let record = R::from_item::<S>(item, &Default::default());
        Self(record, PhantomData)
    }
}
