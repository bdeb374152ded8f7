//! The state of all ranks as a record of the whole model, and back: what a `Learner` saves and loads.
//!
//! A record is the same whatever the number of ranks, and that of an optimizer without any.

use core::ops::Range;
use std::collections::HashMap;

use burn::module::ParamId;
use burn::optim::Optimizer;
use burn::tensor::backend::AutodiffBackend;
use serde_json::Value as Json;

use super::parameter_shards::ParameterShards;
use super::zero_optimizer::ZeroOptimizer;
use crate::group::Pending;
use crate::reduce::Layout;
use crate::shard::Partition;
use crate::state::{Loaded, Naming, by_name, put_together, refuse, take_apart, wanted};
use crate::{Stage, ZeroError, ZeroOptimizerError, ZeroSettings};

impl<O> ZeroOptimizer<O> {
    /// The state of all ranks under the ids of the model's parameters. All ranks call it; rank 0 gets it, the others
    /// their own. One tensor after the other goes to rank 0 alone: every other rank sends its part once and receives nothing. A
    /// tensor is on its way while the one before it is put together. The record is on `device`.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::NotPrepared`], [`ZeroOptimizerError::State`]; [`ZeroError::Disagreement`] if ranks have other step
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
        let naming = Naming::of_pieces(layout.parameters().len());
        let (own, taken) = take_apart::<B, _>(self.inner.to_record(), layout, naming)?;
        let tree = self.unite(own)?;
        let mut own = by_name(taken);

        let whole = whole(layout)?;
        let world_size = self.group.world_size();
        let shards: Vec<_> = (0..world_size).map(|rank| layout.shards_of(rank)).collect();
        let mut tensors = HashMap::new();
        let mut pieces = wanted(&tree, &whole, Naming::of_module(ids), HashMap::new())?.into_iter();
        let mut start = || {
            let (parameter, piece) = pieces.next()?;
            let name = &piece.tensor.name;
            let label = format!("state of the optimizer: {name}");
            let own = own.remove(name).unwrap_or_default().bytes;
            let parts = Pending::start(&*self.group, move |ranks| {
                ranks.gather_bytes_to(&label, 0, own)
            });
            Some((parameter, piece, parts))
        };
        let mut underway = start();
        while let Some((parameter, piece, parts)) = underway {
            underway = start();
            let Some(parts) = parts.wait()? else { continue };
            let (bytes, tensor) = (piece.bytes(), piece.tensor);
            let ranges = shards.iter().map(|shard| &shard[parameter][..]);
            let bytes = join(bytes, tensor.element_bytes(), ranges.zip(&parts));
            let shape = tensor.shape;
            tensors.insert(tensor.name, Loaded { shape, bytes });
        }
        if self.group.rank() != 0 {
            return Ok(self.inner.to_record());
        }
        let naming = Naming::of_module(ids);
        Ok(put_together::<B, _>(
            &tree, &whole, naming, tensors, device,
        )?)
    }

    /// What the wrapped optimizer has loaded of the whole model becomes the state of this rank's pieces.
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
        let whole = whole(layout)?;
        let naming = Naming::of_module(ids);
        let (tree, taken) = take_apart::<B, _>(self.inner.to_record(), &whole, naming)?;
        if taken.is_empty() {
            return Ok(()); // nothing was loaded
        }
        let loaded = by_name(taken);
        let naming = || Naming::of_pieces(layout.parameters().len());
        let pieces = wanted(&tree, layout, naming(), HashMap::new())?.into_iter();
        let pieces = pieces.filter_map(|(_, piece)| {
            let size = piece.tensor.element_bytes();
            let bytes = piece.range.start * size..piece.range.end * size;
            let bytes = loaded.get(&piece.tensor.name)?.bytes[bytes].to_vec();
            Some((piece, bytes))
        });
        let pieces = by_name(pieces);
        drop(loaded);
        let record = put_together::<B, _>(&tree, layout, naming(), pieces, device)?;
        self.inner = self.inner.clone().load_record(record);
        Ok(())
    }

    fn layout(&self) -> Result<&Layout, ZeroOptimizerError> {
        let reducer = self.reducer.as_deref();
        Ok(reducer.ok_or(ZeroOptimizerError::NotPrepared)?.layout())
    }

    /// All ranks' parts of what is no tensor.
    fn unite(&self, own: Json) -> Result<Json, ZeroError> {
        let label = "state of the optimizer";
        let all = self
            .group
            .gather_bytes(label, own.to_string().into_bytes())?;
        let mut united = Json::Null;
        for (peer, bytes) in all.iter().enumerate() {
            let theirs: Json = serde_json::from_slice(bytes).map_err(refuse)?;
            if let Err((value, peer_value)) = merge(&mut united, theirs) {
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

/// So many bytes of a tensor from those of each rank's ranges.
fn join<'a>(
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

/// Adds what is not there yet.
fn merge(ours: &mut Json, theirs: Json) -> Result<(), (Json, Json)> {
    match (ours, theirs) {
        (ours @ Json::Null, theirs) => *ours = theirs,
        (_, Json::Null) => {}
        (Json::Object(ours), Json::Object(theirs)) => {
            for (key, value) in theirs {
                merge(ours.entry(key).or_insert(Json::Null), value)?;
            }
        }
        (ours, theirs) if *ours == theirs => {}
        (ours, theirs) => return Err((ours.clone(), theirs)),
    }
    Ok(())
}
