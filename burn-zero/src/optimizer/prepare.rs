//! Getting to know a model, before its first forward.

use std::sync::Arc;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::parameters::Parameters;
use super::{initial, trial};
use crate::backend::attach;
use crate::group::{Agree, ProcessGroup};
use crate::reduce::{Exchange, Layout};
use crate::{Sharding, ShardingError, Stage, ZeroError};

/// The model with the weights of rank 0, and the exchange of its gradients. `tried` is what the optimizer made of the
/// trial.
///
/// # Errors
///
/// Why the optimizer was refused; [`ShardingError::NotSharded`], [`ShardingError::UnsupportedDtype`]; [`ZeroError::Disagreement`] if the ranks' optimizers
/// or models differ; those of the group.
pub(crate) fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &Arc<dyn ProcessGroup>,
    sharding: &Sharding,
    tried: Result<Vec<f32>, ShardingError>,
) -> Result<(M, Arc<Exchange>), ZeroError> {
    let parameters = Parameters::of::<B, M>(&module);
    if group.world_size() > 1 {
        parameters.check_dtypes()?;
        if sharding.stage == Stage::Gradients && parameters.nodes.contains(&None) {
            let device = module.devices().into_iter().next().unwrap_or_default();
            let backend = B::name(&device);
            return Err(ShardingError::NotSharded { backend }.into());
        }
    }
    trial::agree(&**group, tried)?;
    let all: Vec<_> = parameters
        .list
        .iter()
        .map(|p| format!("{} {:?} {:?}", p.path, p.shape, p.dtype))
        .collect();
    group.agree_equal("parameters", &all.join(", "))?;

    let module = initial::broadcast::<B, M>(module, &**group)?;
    let (world_size, rank) = (group.world_size(), group.rank());
    let layout = Layout::new(parameters.list, world_size, rank, sharding)?;
    let exchange = Exchange::new(layout, group.clone(), sharding);
    Ok((module, Arc::new(exchange)))
}

/// From now on this thread looks out for the leaves of the model. The ids of its parameters, in their order.
pub(crate) fn attach_to<B: AutodiffBackend, M: AutodiffModule<B>>(
    exchange: &Arc<Exchange>,
    world_size: usize,
    module: &M,
) -> Vec<ParamId> {
    let parameters = Parameters::of::<B, M>(module);
    if world_size > 1 {
        attach(exchange, &parameters.nodes);
    }
    parameters.ids()
}

/// The device of the first parameter. Unlike `Module::devices` it initialises none: in a copy of a model they would get
/// other values than in the model itself.
pub(crate) fn device_of<B: Backend, M: Module<B>>(module: &M) -> Device<B> {
    let mut first = First::<B>(None);
    module.visit(&mut first);
    first.0.unwrap_or_default()
}

struct First<B: Backend>(Option<Device<B>>);

impl<B: Backend> ModuleVisitor<B> for First<B> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<B, D, Int>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<B, D, Bool>>) {
        self.0.get_or_insert_with(|| param.lazy_device());
    }
}
