//! The state of all ranks as a record of the whole model, and back: what a `Learner` saves and loads.
//!
//! A record is the same whatever the number of ranks, and that of an optimizer without any. `apart.rs` takes a record apart by
//! names and `together.rs` puts one together; `naming.rs` has the ids that pieces and parameters have in it.

mod apart;
mod naming;
mod together;

use core::ops::Range;
use std::collections::HashMap;

use burn::module::ParamId;
use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::{DType, TensorData, backend::AutodiffBackend};
use ciborium::Value;
use serde_json::Value as Json;

use apart::Apart;
use naming::Naming;
use together::Together;

use super::shards::Shards;
use super::zero_optimizer::ZeroOptimizer;
use crate::reduce::{Exchange, Layout};
use crate::shard::Partition;
use crate::{Sharding, ShardingError, Stage, ZeroError};

type Item<R, B> = <R as Record<B>>::Item<FullPrecisionSettings>;

/// The state of the optimizer, as one rank holds it.
#[derive(Clone, Debug, PartialEq)]
struct ShardState {
    /// What this rank's shard is of each tensor of the state; those of all ranks are the whole tensors, each element once.
    tensors: Vec<StateTensor>,
    /// All that is no tensor, such as step counts: the same on all ranks.
    rest: Json,
}

/// Some elements of a tensor of the state.
#[derive(Clone, Debug, PartialEq)]
struct StateTensor {
    /// Which ones.
    slot: StateSlot,
    /// The elements of the ranges, one behind the other, `[elements]`.
    data: TensorData,
}

/// A place for elements of a tensor of the state.
#[derive(Clone, Debug, PartialEq)]
struct StateSlot {
    /// Path of the parameter and of the tensor in the state of its optimizer.
    name: String,
    /// Shape of the whole tensor: that of the parameter.
    shape: Vec<usize>,
    /// Type of the elements.
    dtype: DType,
    /// Elements of the flat tensor, ascending.
    ranges: Vec<Range<usize>>,
}

/// Marks a map whose keys are paths of parameters.
const PARAMETERS: &str = "$parameters";
/// Marks the place of a tensor; holds its type.
const TENSOR: &str = "$tensor";

impl<O> ZeroOptimizer<O> {
    /// The state of all ranks under the ids of the model's parameters. All ranks call it; rank 0 gets it, the others
    /// their own. One tensor after the other goes over the group, so that no other rank holds more than one.
    pub(in crate::optimizer) fn to_whole_record<B>(
        &self,
        ids: &[ParamId],
    ) -> Result<O::Record, ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<Shards<B>, B>,
    {
        let state = self.to_state::<B>()?;
        let layout = self.prepared()?.layout();
        let whole = whole(layout)?;
        let naming = || Naming::of_module(&whole, ids);
        let mut own: HashMap<_, _> = state
            .tensors
            .into_iter()
            .map(|StateTensor { slot, data }| (slot.name, data.bytes.to_vec()))
            .collect();

        let mut wanted = Together::new(&whole, naming(), HashMap::new());
        wanted.walk(&state.rest, None, &mut Vec::new())?;
        let world_size = self.group.world_size();
        let shards: Vec<_> = (0..world_size).map(|rank| layout.shards_of(rank)).collect();
        let mut tensors = HashMap::new();
        for (slot, parameter) in wanted.slots.into_iter().zip(wanted.parameters) {
            let label = format!("state of the optimizer: {}", slot.name);
            let bytes = own.remove(&slot.name).unwrap_or_default();
            let parts = self.group.gather_bytes(&label, bytes)?;
            if self.group.rank() == 0 {
                let ranges = shards.iter().map(|shard| &shard[parameter][..]);
                let bytes = put_together(&slot.shape, slot.dtype.size(), ranges.zip(&parts));
                let data = TensorData::from_bytes_vec(bytes, slot.shape, slot.dtype);
                tensors.insert(slot.name, data);
            }
        }
        if self.group.rank() != 0 {
            return Ok(self.inner.to_record());
        }
        let mut together = Together::new(&whole, naming(), tensors);
        let tree = together.walk(&state.rest, None, &mut Vec::new())?;
        let item: Item<O::Record, B> = tree.deserialized().map_err(refuse)?;
        Ok(O::Record::from_item::<FullPrecisionSettings>(
            item,
            &Default::default(),
        ))
    }

    /// What the wrapped optimizer has loaded of the whole model becomes the state of this rank's pieces.
    pub(in crate::optimizer) fn cut_state<B>(
        &mut self,
        ids: &[ParamId],
        device: &B::Device,
    ) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<Shards<B>, B>,
    {
        let layout = self.prepared()?.layout();
        let whole = whole(layout)?;
        let item = self.inner.to_record().into_item::<FullPrecisionSettings>();
        let tree = Value::serialized(&item).map_err(refuse)?;
        drop(item);
        let mut apart = Apart::new(&whole, Naming::of_module(&whole, ids));
        let rest = apart.walk(tree, None, &mut Vec::new())?;
        if apart.tensors.is_empty() {
            return Ok(()); // nothing was loaded
        }
        let loaded = apart.tensors.into_iter();
        let mut loaded: HashMap<_, _> = loaded
            .map(|StateTensor { slot, data }| (slot.name, data))
            .collect();

        let naming = || Naming::of_pieces(layout);
        let mut wanted = Together::new(layout, naming(), HashMap::new());
        wanted.walk(&rest, None, &mut Vec::new())?;
        let mut tensors = HashMap::new();
        for slot in wanted.slots {
            if let Some(data) = loaded.remove(&slot.name) {
                let bytes = cut(&data.bytes, &slot.ranges, slot.dtype.size());
                let elements = bytes.len() / slot.dtype.size();
                let piece = TensorData::from_bytes_vec(bytes, [elements], slot.dtype);
                tensors.insert(slot.name, piece);
            }
        }
        let mut together = Together::new(layout, naming(), tensors);
        let tree = together.walk(&rest, None, &mut Vec::new())?;
        if let Some(name) = together.missing {
            return Err(refuse(format!("{name} is missing")).into());
        }
        let item: Item<O::Record, B> = tree.deserialized().map_err(refuse)?;
        let record = O::Record::from_item::<FullPrecisionSettings>(item, device);
        self.inner = self.inner.clone().load_record(record);
        Ok(())
    }

    /// The state by names. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`], [`ShardingError::State`]; [`ZeroError::Disagreement`] if ranks have other step
    /// counts for the same parameter; those of the group.
    fn to_state<B>(&self) -> Result<ShardState, ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<Shards<B>, B>,
    {
        let exchange = self.prepared()?;
        let item = self.inner.to_record().into_item::<FullPrecisionSettings>();
        let tree = Value::serialized(&item).map_err(refuse)?;
        let mut apart = Apart::new(exchange.layout(), Naming::of_pieces(exchange.layout()));
        let own = apart.walk(tree, None, &mut Vec::new())?;
        let rest = self.unite(own)?;
        Ok(ShardState {
            tensors: apart.tensors,
            rest,
        })
    }

    fn prepared(&self) -> Result<&Exchange, ShardingError> {
        self.exchange.as_deref().ok_or(ShardingError::NotPrepared)
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
    let sharding = Sharding {
        partition: Partition::Whole,
        ..Sharding::stage(Stage::DataParallel)
    };
    Layout::new(layout.parameters().to_vec(), 1, 0, &sharding)
}

/// The bytes of a tensor from those of each rank's ranges.
fn put_together<'a>(
    shape: &[usize],
    size: usize,
    parts: impl Iterator<Item = (&'a [Range<usize>], &'a Vec<u8>)>,
) -> Vec<u8> {
    let mut whole = vec![0; shape.iter().product::<usize>() * size];
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

fn cut(bytes: &[u8], ranges: &[Range<usize>], size: usize) -> Vec<u8> {
    let pieces = ranges
        .iter()
        .map(|range| &bytes[range.start * size..range.end * size]);
    pieces.collect::<Vec<_>>().concat()
}

fn refuse(reason: impl ToString) -> ShardingError {
    ShardingError::State {
        reason: reason.to_string(),
    }
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
