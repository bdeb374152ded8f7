//! Getting to know a model, before its first forward.

use std::sync::Arc;

use burn::module::{AutodiffModule, Module, ModuleVisitor, Param, ParamId};
use burn::optim::Optimizer;
use burn::tensor::backend::{AutodiffBackend, Backend};
use burn::tensor::{Bool, Device, Int, Tensor};

use super::parameters::Parameters;
use super::shards::Shards;
use super::{elementwise, initial};
use crate::backend::attach;
use crate::group::{Agree, ProcessGroup};
use crate::reduce::{Exchange, Layout};
use crate::shard::Partition;
use crate::{Memory, Sharding, ShardingError, Stage, ZeroError};

/// Whether an optimizer can be sharded as asked.
///
/// # Errors
///
/// [`ShardingError::NotElementwise`].
pub(crate) fn check_optimizer<B, O>(
    optimizer: &O,
    sharding: &Sharding,
    device: &B::Device,
) -> Result<(), ZeroError>
where
    B: AutodiffBackend,
    O: Optimizer<Shards<B>, B>,
{
    match sharding.partition {
        Partition::Flat => Ok(elementwise::check::<B, O>(optimizer, device)?),
        Partition::Whole => Ok(()),
    }
}

/// The model with the weights of rank 0, and the exchange of its gradients. `optimizer` is the name of a type.
///
/// # Errors
///
/// [`ShardingError::LocalNorm`], [`ShardingError::NotSharded`], [`ShardingError::UnsupportedDtype`];
/// [`ZeroError::Disagreement`] if the ranks' models differ; those of the group.
pub(crate) fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &Arc<dyn ProcessGroup>,
    sharding: &Sharding,
    optimizer: &str,
    receives_norm: bool,
) -> Result<(M, Arc<Exchange>), ZeroError> {
    let parameters = Parameters::of::<B, M>(&module);
    let ranks = group.world_size() > 1;
    let leave = (ranks && sharding.stage == Stage::Gradients) || sharding.gradients == Memory::Host;
    if leave && parameters.nodes.contains(&None) {
        let device = module.devices().into_iter().next().unwrap_or_default();
        let backend = B::name(&device);
        return Err(ShardingError::NotSharded { backend }.into());
    }
    if ranks {
        parameters.check_dtypes()?;
        if !receives_norm && optimizer.contains("ClipGlobalNorm") {
            let optimizer = optimizer.to_owned();
            return Err(ShardingError::LocalNorm { optimizer }.into());
        }
    }
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
    module: &M,
) -> Vec<ParamId> {
    let parameters = Parameters::of::<B, M>(module);
    if !exchange.is_idle() {
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
