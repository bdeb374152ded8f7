//! The state of all ranks as a record of the whole model, and back: what a `Learner` saves and loads.
//!
//! The record does not depend on the number of ranks and equals that of the wrapped optimizer alone.

use core::ops::Range;
use std::collections::HashMap;

use burn::module::ParamId;
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use serde_json::Value as Json;

use super::parameter_shards::ParameterShards;
use super::zero_optimizer::ZeroOptimizer;
use crate::record::unite;
use crate::reduce::Layout;
use crate::shard::Partition;
use crate::state::{StateIds, StateTensor, cut, join, refuse, split, to_record};
use crate::{Stage, ZeroError, ZeroOptimizerError, ZeroSettings};

impl<O> ZeroOptimizer<O> {
    /// The state of all ranks under the ids of the model's parameters, on `device`. All ranks call it; rank 0 gets the whole, the others
    /// their own state. Tensors are gathered to rank 0 one by one: every other rank sends its shard once and receives nothing.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::State`]; [`ZeroError::Disagreement`] if ranks have different step
    /// counts for the same parameter; those of the group.
    pub(in crate::optimizer) fn to_whole_record<B>(
        &self,
        ids: &[ParamId],
        device: &B::Device,
    ) -> Result<O::Record, ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let layout = self.layout()?;
        let ids_of_shards = StateIds::of_shards(layout.parameters().len());
        let (own, tensors) = split::<B, _>(self.inner.to_record(), layout, &ids_of_shards)?;
        let tree = self.unite(own)?;
        let tensors = tensors.into_iter();
        let mut own: HashMap<_, _> = tensors
            .map(|(tensor, bytes)| (tensor.spec.name, bytes))
            .collect();
        let shards: Vec<_> = (0..self.group.world_size())
            .map(|rank| layout.shards_of(rank))
            .collect();
        let tree = join(
            &tree,
            &whole(layout)?,
            &StateIds::of_module(ids),
            |tensor| {
                let StateTensor { spec, key, .. } = tensor;
                let label = format!("state of the optimizer: {}", spec.name);
                let own = own.remove(&spec.name).unwrap_or_default();
                let Some(parts) = self.group.gather_bytes_to(&label, 0, own)? else {
                    return Ok(None);
                };
                let ranges = shards.iter().map(|shard| &shard[key.parameter][..]);
                let bytes = spec.elements().unwrap_or_default() * spec.element_bytes();
                let bytes = gather(bytes, spec.element_bytes(), ranges.zip(&parts));
                Ok::<_, ZeroError>(Some((Vec::new(), bytes)))
            },
        )?;
        match self.group.rank() {
            0 => Ok(to_record::<B, _>(tree, device)?),
            _ => Ok(self.inner.to_record()),
        }
    }

    /// Cuts the state of the whole model, which the wrapped optimizer has loaded, to this rank's shards. Costs two copies of the
    /// whole state in host memory, and one of the shards.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::State`].
    pub(in crate::optimizer) fn cut_state<B>(
        &mut self,
        ids: &[ParamId],
        device: &B::Device,
    ) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<ParameterShards<B>, B>,
    {
        let layout = self.layout()?;
        let of_module = StateIds::of_module(ids);
        let (tree, tensors) = split::<B, _>(self.inner.to_record(), &whole(layout)?, &of_module)?;
        if tensors.is_empty() {
            return Ok(()); // nothing was loaded
        }
        let tensors = tensors.into_iter();
        let mut loaded: HashMap<_, _> = tensors
            .map(|(tensor, bytes)| (tensor.spec.name, bytes))
            .collect();
        let of_shards = StateIds::of_shards(layout.parameters().len());
        let tree = join(
            &tree,
            layout,
            &of_shards,
            |StateTensor { spec, ranges, .. }| {
                let mut bytes = loaded.remove(&spec.name).unwrap_or_default();
                let held: usize = ranges.iter().map(Range::len).sum();
                if Some(held) != spec.elements() {
                    bytes = cut(&bytes, ranges, spec.element_bytes());
                }
                Ok::<_, ZeroError>(Some((Vec::new(), bytes)))
            },
        )?;
        drop(loaded);
        let record = to_record::<B, _>(tree, device)?;
        self.inner = self.inner.clone().load_record(record);
        Ok(())
    }

    fn layout(&self) -> Result<&Layout, ZeroOptimizerError> {
        let reducer = self.reducer.as_deref();
        Ok(reducer.ok_or(ZeroOptimizerError::NotPrepared)?.layout())
    }

    /// The trees of all ranks, united.
    fn unite(&self, own: Json) -> Result<Json, ZeroError> {
        let label = "state of the optimizer";
        let all = self
            .group
            .gather_bytes(label, own.to_string().into_bytes())?;
        let mut united = Json::Null;
        for (peer, bytes) in all.iter().enumerate() {
            let theirs: Json = serde_json::from_slice(bytes).map_err(refuse)?;
            if let Err((value, peer_value)) = unite(&mut united, theirs) {
                return Err(ZeroError::Disagreement {
                    label: label.to_owned(),
                    rank: self.group.rank(),
                    value: value.to_string(),
                    peer,
                    peer_value: peer_value.to_string(),
                });
            }
        }
        Ok(united)
    }
}

/// The layout of one rank that holds all parameters in their shapes.
fn whole(layout: &Layout) -> Result<Layout, ZeroError> {
    let settings = ZeroSettings {
        partition: Partition::Whole,
        ..ZeroSettings::stage(Stage::DataParallel)
    };
    Layout::new(layout.parameters().to_vec(), 1, 0, &settings)
}

/// The bytes of a whole tensor from those of each rank's ranges.
fn gather<'a>(
    bytes: usize,
    size: usize,
    parts: impl Iterator<Item = (&'a [Range<usize>], &'a Vec<u8>)>,
) -> Vec<u8> {
    let mut whole = vec![0; bytes];
    for (ranges, part) in parts {
        let mut rest = &part[..];
        for range in ranges {
            let Some((bytes, after)) = rest.split_at_checked(range.len() * size) else {
                break; // a rank that has no state of this parameter
            };
            whole[range.start * size..range.end * size].copy_from_slice(bytes);
            rest = after;
        }
    }
    whole
}
