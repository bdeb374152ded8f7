//! The state of all ranks as a record of the whole model, and back: what a `Learner` saves and
//! loads.
//!
//! The record does not depend on the number of ranks and equals that of the update without ranks.

use std::collections::HashMap;

use burn::module::ParamId;
use burn::tensor::backend::AutodiffBackend;
use burn_ranks::{Partition, ProcessGroup, RanksError};
use burn_update::UpdateError;
use ciborium::Value;
use serde_json::Value as Json;

use super::shard_update::ShardUpdate;
use super::sharding::Sharding;
use crate::error::ZeroError;
use crate::record::unite;
use crate::reduce::Layout;
use crate::settings::{Stage, ZeroSettings};
use crate::state::{
    StateIds, StateTensor, Tensors, cut, ids_of_shards, join, refuse, split, state_ids, to_record,
};

impl Sharding {
    /// The state of all ranks under the ids of the model's parameters, as the tree of a record. All
    /// ranks call it; only rank 0 gets the tree. Tensors are gathered to rank 0 one by one: every
    /// other rank sends its shard once and receives nothing.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], [`ShardingFault::State`];
    /// [`RanksError::Disagreement`] if ranks have different step counts for the same parameter;
    /// those of the group.
    pub(in crate::update) fn gather_whole<B>(
        &self,
        ids: &[ParamId],
        inner: &ShardUpdate<B>,
    ) -> Result<Option<Value>, ZeroError>
    where
        B: AutodiffBackend,
    {
        let reducer = self.reducer()?;
        let (layout, group) = (reducer.layout(), reducer.group());
        let of_shards = ids_of_shards(layout);
        let (own, tensors) = split::<B, _>(inner.record(), layout, &of_shards)?;
        let tree = united(group, own)?;
        let mut own = by_name(tensors);
        let ranks = 0..group.world_size();
        let shards: Vec<_> = ranks.map(|rank| layout.map().shard(rank)).collect();
        let of_module = state_ids(ids.iter().copied());
        let tree = join(&tree, &whole(layout)?, &of_module, |tensor| {
            let StateTensor {
                spec, parameter, ..
            } = tensor;
            let label = format!("state of the optimizer: {}", spec.name);
            let own = own.remove(&spec.name).unwrap_or_default();
            let Some(parts) = group.gather_bytes_to(&label, 0, own)? else {
                return Ok(None);
            };
            let size = spec.element_bytes();
            let mut bytes = vec![0; spec.elements().unwrap_or_default() * size];
            for (shard, part) in shards.iter().zip(&parts) {
                let mut rest = &part[..];
                // Empty if the rank has no state of this parameter.
                for range in shard[*parameter].iter().filter(|_| !part.is_empty()) {
                    let (bytes_of_range, after) = rest.split_at(range.len() * size);
                    bytes[range.start * size..range.end * size].copy_from_slice(bytes_of_range);
                    rest = after;
                }
            }
            Ok::<_, ZeroError>(Some(bytes))
        })?;
        Ok(Some(tree).filter(|_| group.rank() == 0))
    }

    /// Cuts the state of the whole model, which the optimizer has loaded, to this rank's
    /// shards. Costs two copies of the whole state in host memory, and one of the shards. State of
    /// others of `all` parameters, which are not trained now, is left out.
    ///
    /// # Errors
    ///
    /// [`ShardingFault::NotPrepared`], [`ShardingFault::State`].
    pub(in crate::update) fn cut_state<B>(
        &self,
        ids: &[ParamId],
        all: Vec<ParamId>,
        device: &B::Device,
        inner: &mut ShardUpdate<B>,
    ) -> Result<(), UpdateError>
    where
        B: AutodiffBackend,
    {
        let reducer = self.reducer()?;
        let layout = reducer.layout();
        let mut of_module: StateIds = all.iter().map(|id| (id.serialize(), None)).collect();
        of_module.extend(state_ids(ids.iter().copied()));
        let record = inner.record();
        let (tree, tensors) = split::<B, _>(record, &whole(layout)?, &of_module)?;
        let mut loaded = by_name(tensors);
        let tree = join(&tree, layout, &ids_of_shards(layout), |tensor| {
            let StateTensor { spec, ranges, .. } = tensor;
            let bytes = loaded.remove(&spec.name).unwrap_or_default();
            let bytes = cut(bytes, ranges, spec);
            Ok::<_, ZeroError>(Some(bytes))
        })?;
        inner.load(to_record::<B, _>(tree, device)?)
    }
}

/// The trees of all ranks, united.
fn united(group: &dyn ProcessGroup, own: Json) -> Result<Json, ZeroError> {
    let label = "state of the optimizer";
    let all = group.gather_bytes(label, own.to_string().into_bytes())?;
    let trees = all.iter().map(|bytes| serde_json::from_slice(bytes));
    let trees = trees.collect::<Result<_, _>>().map_err(refuse)?;
    let united =
        unite(trees).map_err(
            |[(rank, value), (peer, peer_value)]| RanksError::Disagreement {
                label: label.to_owned(),
                rank,
                value: value.to_string(),
                peer,
                peer_value: peer_value.to_string(),
            },
        );
    Ok(united?)
}

fn by_name(tensors: Tensors) -> HashMap<String, Vec<u8>> {
    let tensors = tensors.into_iter();
    tensors
        .map(|(tensor, bytes)| (tensor.spec.name, bytes))
        .collect()
}

/// The layout of one rank that holds all parameters in their shapes.
fn whole(layout: &Layout) -> Result<Layout, ZeroError> {
    let settings = ZeroSettings {
        partition: Partition::Whole,
        ..ZeroSettings::stage(Stage::DataParallel)
    };
    Layout::new(layout.parameters().to_vec(), 1, 0, &settings)
}
