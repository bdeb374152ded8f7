//! Preparing a model before its first forward: the ranks' models and optimizers are compared, and rank 0's weights broadcast.

use std::collections::{BTreeSet, HashSet};
use std::sync::{Arc, Weak};

use burn::module::{AutodiffModule, ParamId};
use burn::optim::Optimizer;
use burn::tensor::{TensorData, backend::AutodiffBackend};
use burn_decorator::gradient::{Ranks, decide_with, keep_on_host};

use super::parameter_shards::ParameterShards;
use super::parameters::Parameters;
use super::statistics::{Statistics, independent_if_shared};
use super::step::own_shards;
use super::trial;
use super::zero_optimizer::ZeroOptimizer;
use crate::backend::{attach, stream};
use crate::group::{Agree, HostBuffer, ProcessGroup};
use crate::host::{exchanged, floats};
use crate::module::replace_tensors;
use crate::parameters::offload_parameters;
use crate::reduce::{GradientReducer, Layout};
use crate::{Memory, Stage, ZeroError, ZeroOptimizerError, raise};

impl<O> ZeroOptimizer<O> {
    /// The model with its parameters where the settings want them.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NoRemat`].
    pub(super) fn placed<B, M>(&self, module: M, ranks: usize) -> Result<M, ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
    {
        match self.settings.parameters {
            Memory::Device if ranks == 1 || self.settings.stage != Stage::Parameters => Ok(module),
            _ => Ok(offload_parameters::<B, M>(module)?),
        }
    }

    /// The model with the weights of rank 0, hooked on this thread, which draws random numbers of its rank from now on. Returns the ids of
    /// its parameters too, in their order.
    ///
    /// # Errors
    ///
    /// Those of [`ZeroOptimizer::prepare`].
    pub(super) fn prepare_on<B, M>(
        &mut self,
        group: Arc<dyn ProcessGroup>,
        module: M,
        device: &B::Device,
    ) -> Result<(M, Vec<ParamId>), ZeroError>
    where
        B: AutodiffBackend,
        M: AutodiffModule<B>,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let (ranks, rank, settings) = (group.world_size(), group.rank(), &self.settings);
        let gathers_units = ranks > 1 && settings.stage == Stage::Parameters;
        let module = self.placed::<B, M>(module, ranks)?;
        let norm = self.norm.as_ref();
        let tried = trial::run::<B, O>(&self.inner, settings, ranks, norm, device);
        let seed = self.seed.filter(|_| ranks > 1);
        let parameters = Parameters::of::<B, M>(&module);
        let leave = ranks > 1 && settings.stage.shards_gradients();
        let what = if leave || settings.gradients == Memory::Host {
            Some("gradients leave during backward (stage 2, and `gradients: Memory::Host`)")
        } else {
            seed.map(|_| "`with_seed` gives each rank random numbers of its own")
        };
        if let Some(what) = what.filter(|_| !parameters.are_hooked) {
            let backend = B::name(device);
            return Err(ZeroOptimizerError::NotSharded { what, backend }.into());
        }
        parameters.check(ranks, settings.partition)?;
        trial::agree(&*group, tried)?;
        group.agree_equal("parameters", &parameters.describe())?;

        let module = broadcast::<B, M>(module, &*group)?;
        let layout = Layout::new(parameters.list, ranks, rank, settings)?;
        let reducer = Arc::new(GradientReducer::new(layout, group.clone(), settings));
        if let Some(seed) = seed {
            stream::begin(&reducer, rank, seed);
        }
        let known = {
            let mut prepared = self.prepared.lock();
            prepared.reducer = Some(reducer.clone());
            prepared.shards.take()
        };
        let module = match gathers_units {
            false => module,
            true => {
                let parameters = Parameters::of::<B, M>(&module);
                let own =
                    own_shards::<B, M>(known.as_deref(), reducer.layout(), &parameters, &module);
                let none = HashSet::new();
                self.shard::<B, M>(module, &reducer, None, own, none, "the start")
            }
        };
        let ids = attach_to::<B, M>(&reducer, &module);
        (self.group, self.reducer) = (group, Some(reducer));
        Ok((module, ids))
    }
}

/// From now on this thread hooks the leaves of the model, and its collective decisions ask these ranks. Returns the ids of the
/// parameters, in their order.
pub(crate) fn attach_to<B: AutodiffBackend, M: AutodiffModule<B>>(
    reducer: &Arc<GradientReducer>,
    module: &M,
) -> Vec<ParamId> {
    let parameters = Parameters::of::<B, M>(module);
    if !reducer.is_idle() {
        attach(reducer, &parameters.nodes);
    }
    let ranks: Weak<GradientReducer> = Arc::downgrade(reducer);
    if reducer.memory == Memory::Host {
        keep_on_host(ranks.clone());
    }
    if reducer.group().world_size() > 1 {
        decide_with(ranks);
    }
    parameters.ids()
}

impl Ranks for GradientReducer {
    fn union(&self, names: Vec<String>) -> Vec<String> {
        let label = "which gradients are non-finite";
        let own = names.join("\n").into_bytes();
        let all = raise(self.group().gather_bytes(label, own));
        let all: Vec<_> = all.iter().map(|own| String::from_utf8_lossy(own)).collect();
        let names: BTreeSet<_> = all.iter().flat_map(|own| own.lines()).collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

/// Rank 0's module on every rank, with leaves and running statistics of this rank's own: all its tensors, frozen ones and buffers
/// included.
///
/// Mapping running statistics holds a lock that clones on other ranks would wait for. So each rank first gets statistics of its own,
/// and they are broadcast outside of any mapper. Parameters have no lock: each is broadcast when it is replaced, so that there is
/// never a second copy of all of them.
///
/// # Errors
///
/// Those of the group.
fn broadcast<B: AutodiffBackend, M: AutodiffModule<B>>(
    module: M,
    group: &dyn ProcessGroup,
) -> Result<M, ZeroError> {
    if group.world_size() == 1 {
        return Ok(replace_tensors::<B, M>(module, &mut |_, own| Some(own())));
    }
    let module = independent_if_shared::<B, M>(module);
    let statistics = Statistics::of::<B, M>(&module);
    statistics.share::<B, M>(&module, group)?;
    let mut failed = None;
    let module = replace_tensors::<B, M>(module, &mut |path, own| {
        if failed.is_some() || statistics.contains(path) {
            return None;
        }
        receive(group, path, own())
            .map_err(|error| failed = Some(error))
            .ok()
    });
    failed.map_or(Ok(module), Err)
}

/// Rank 0's data.
fn receive(group: &dyn ProcessGroup, path: &str, own: TensorData) -> Result<TensorData, ZeroError> {
    let label = format!("initial {path}");
    let (shape, dtype) = (own.shape.clone(), own.dtype);
    let Some(buffer_dtype) = exchanged(dtype) else {
        // Rare and small: no collective of their own.
        let bytes = match group.rank() {
            0 => own.bytes.to_vec(),
            _ => Vec::new(),
        };
        let first = group.gather_bytes(&label, bytes)?.swap_remove(0);
        return Ok(TensorData::from_bytes_vec(first, shape, dtype));
    };
    let buffer = HostBuffer::from_f32(buffer_dtype, floats(own));
    let received = group.broadcast(&label, 0, buffer)?.into_f32();
    Ok(TensorData::new(received, shape).convert_dtype(dtype))
}
