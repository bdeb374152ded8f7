//! The update inside of a reduction: clipping and optimizer, which run on this rank's shards.

use std::collections::HashMap;

use burn::module::{AutodiffModule, ParamId};
use burn::optim::GradientsParams;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::{DType, Tensor};
use burn_update::{LastParts, Parameter, Step, UpdateError, UpdateRecord};

use super::parameter_shards::{ParameterShards, shard_id};
use crate::parameters::Parameters;
use crate::parameters::module::device_of;

/// Clipping and optimizer, on this rank's shards of the parameters. A clone is independent of it.
#[derive(Clone)]
pub(super) struct ShardUpdate<B: AutodiffBackend> {
    pub(super) parts: LastParts<ParameterShards<B>, B>,
    /// The ids of the model's trained parameters, by those of their shards.
    trained: HashMap<ParamId, ParamId>,
}

impl<B: AutodiffBackend> ShardUpdate<B> {
    pub(super) fn new(parts: LastParts<ParameterShards<B>, B>) -> Self {
        Self {
            parts,
            trained: HashMap::new(),
        }
    }

    /// Tells the optimizer which parameters the model has, under the ids of their shards.
    ///
    /// # Errors
    ///
    /// Why this model cannot be updated.
    pub(super) fn show<M: AutodiffModule<B>>(&mut self, model: &M) -> Result<(), UpdateError> {
        let parameters = Parameters::of::<B, M>(model);
        let ids = parameters.ids().into_iter().enumerate();
        self.trained = ids.map(|(index, id)| (shard_id(index), id)).collect();
        let mut listed = Parameter::list::<B, M>(model);
        for parameter in &mut listed {
            if let Some(index) = parameters.index.get(&parameter.id) {
                parameter.id = shard_id(*index);
            }
        }
        let no_shards = ParameterShards::with_ids([].into_iter());
        self.parts.prepare(no_shards, &listed)
    }

    /// The ids of the model's parameters that are frozen by their group.
    pub(super) fn frozen(&self) -> Vec<ParamId> {
        let shards = self.parts.frozen().into_iter();
        let trained = shards.filter_map(|shard| self.trained.get(&shard).copied());
        trained.collect()
    }

    /// Updates the shards. `norm` is that of the gradient over all parameters and ranks, if it is
    /// [wanted](Self::wants_norm).
    ///
    /// # Errors
    ///
    /// Why they cannot be updated.
    pub(super) fn step(
        &mut self,
        step: &mut Step<B::InnerBackend>,
        norm: Option<f32>,
        shards: ParameterShards<B>,
        gradients: GradientsParams,
    ) -> Result<ParameterShards<B>, UpdateError> {
        let device = device_of::<B, _>(&shards);
        step.norm = norm.map(|norm| Tensor::from_data([norm], (&device, DType::F32)));
        self.parts.update(step, shards, gradients)
    }

    /// Whether a step over so many ranks needs the norm, which costs a collective.
    pub(super) fn wants_norm(&self, ranks: usize) -> bool {
        ranks > 1 && self.parts.wants_norm()
    }

    /// One for each of the optimizers in it, with its name, for trials.
    pub(super) fn alone(&self) -> Vec<(String, Self)> {
        let each = self.parts.each_alone().into_iter();
        each.map(|(name, parts)| (name, Self::new(parts))).collect()
    }

    /// The state of the shards.
    pub(super) fn record(&self) -> UpdateRecord<B> {
        self.parts.as_optimizer().record()
    }

    /// Continues from a state of the shards.
    ///
    /// # Errors
    ///
    /// Those of [`Update::load`](burn_update::Update::load).
    pub(super) fn load(&mut self, record: UpdateRecord<B>) -> Result<(), UpdateError> {
        let update = self.parts.as_optimizer_mut();
        *update = update.clone().load(record)?;
        Ok(())
    }
}
