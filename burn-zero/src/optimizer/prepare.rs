//! Getting to know a model, before its first forward.

use std::sync::Arc;

use burn::module::{AutodiffModule, ParamId};
use burn::tensor::backend::AutodiffBackend;

use super::parameters::Parameters;
use super::{initial, trial};
use crate::backend::{attach, stream};
use crate::group::{Agree, ProcessGroup};
use crate::reduce::{GradientReducer, Layout};
use crate::{Memory, Partition, Stage, ZeroError, ZeroOptimizerError, ZeroSettings};

/// What an optimizer asks of those who prepare its model.
#[derive(Debug)]
pub(crate) struct Asks {
    /// The name of its type.
    pub(crate) optimizer: &'static str,
    pub(crate) settings: ZeroSettings,
    /// Of each rank's own random numbers.
    pub(crate) seed: Option<u64>,
    /// What it made of the trial, or why it cannot be sharded so.
    pub(crate) tried: Result<Vec<f32>, ZeroOptimizerError>,
}

impl Asks {
    /// What all ranks must ask alike.
    pub(crate) fn shared(&self) -> String {
        let (settings, optimizer) = (&self.settings, self.optimizer);
        format!("{settings:?} of {optimizer}")
    }
}

/// The model with the weights of rank 0, and the exchange of its gradients. This thread draws its rank's numbers from now on.
///
/// # Errors
///
/// Why the optimizer was refused; [`ZeroOptimizerError::NotSharded`], [`ZeroOptimizerError::SeedNotSharded`],
/// [`ZeroOptimizerError::UnsupportedDtype`], [`ZeroOptimizerError::TooManyDimensions`]; [`ZeroError::Disagreement`] if the ranks' optimizers or models differ; those of the group.
pub(crate) fn prepare<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &Arc<dyn ProcessGroup>,
    asks: Asks,
) -> Result<(M, Arc<GradientReducer>), ZeroError> {
    let parameters = Parameters::of::<B, M>(&module);
    let ranks = group.world_size() > 1;
    let settings = &asks.settings;
    let leave = (ranks && settings.stage == Stage::Gradients) || settings.gradients == Memory::Host;
    if leave && parameters.nodes.contains(&None) {
        let device = module.devices().into_iter().next().unwrap_or_default();
        let backend = B::name(&device);
        return Err(ZeroOptimizerError::NotSharded { backend }.into());
    }
    if settings.partition == Partition::Whole {
        parameters.check_dimensions()?;
    }
    if ranks {
        parameters.check_dtypes()?;
        if let (Some(_), true) = (asks.seed, parameters.nodes.contains(&None)) {
            let device = module.devices().into_iter().next().unwrap_or_default();
            let backend = B::name(&device);
            return Err(ZeroOptimizerError::SeedNotSharded { backend }.into());
        }
    }
    trial::agree(&**group, asks.tried)?;
    let all: Vec<_> = parameters
        .list
        .iter()
        .map(|p| format!("{} {:?} {:?}", p.path, p.shape, p.dtype))
        .collect();
    group.agree_equal("parameters", &all.join(", "))?;

    let module = initial::broadcast::<B, M>(module, &**group)?;
    let (world_size, rank) = (group.world_size(), group.rank());
    let layout = Layout::new(parameters.list, world_size, rank, &asks.settings)?;
    let reducer = Arc::new(GradientReducer::new(layout, group.clone(), &asks.settings));
    if let Some(seed) = asks.seed.filter(|_| world_size > 1) {
        stream::begin(&reducer, rank, seed);
    }
    Ok((module, reducer))
}

/// From now on this thread looks out for the leaves of the model. The ids of its parameters, in their order.
pub(crate) fn attach_to<B: AutodiffBackend, M: AutodiffModule<B>>(
    reducer: &Arc<GradientReducer>,
    module: &M,
) -> Vec<ParamId> {
    let parameters = Parameters::of::<B, M>(module);
    if !reducer.is_idle() {
        attach(reducer, &parameters.nodes);
    }
    parameters.ids()
}
