//! The state of the wrapped optimizer, taken apart by names: what sharded records are made of.
//!
//! A record of any of Burn's optimizers is a tree of maps in which parameters are known by ids. Here the ids become
//! paths, and the tensors are taken out, so that any number of ranks can take their parts of them.

mod apart;
mod naming;
mod together;
mod whole;

use core::ops::Range;
use std::collections::HashMap;

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
use crate::reduce::Exchange;
use crate::{ShardingError, ZeroError};

/// The state of the optimizer, as one rank holds it.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardState {
    /// What this rank's shard is of each tensor of the state; those of all ranks are the whole tensors, each element once.
    pub tensors: Vec<StateTensor>,
    /// All that is no tensor, such as step counts: the same on all ranks.
    pub rest: Json,
}

/// Some elements of a tensor of the state.
#[derive(Clone, Debug, PartialEq)]
pub struct StateTensor {
    /// Which ones.
    pub slot: StateSlot,
    /// The elements of the ranges, one behind the other, `[elements]`.
    pub data: TensorData,
}

/// A place for elements of a tensor of the state.
#[derive(Clone, Debug, PartialEq)]
pub struct StateSlot {
    /// Path of the parameter and of the tensor in the state of its optimizer.
    pub name: String,
    /// Shape of the whole tensor: that of the parameter.
    pub shape: Vec<usize>,
    /// Type of the elements.
    pub dtype: DType,
    /// Elements of the flat tensor, ascending.
    pub ranges: Vec<Range<usize>>,
}

/// Marks a map whose keys are paths of parameters.
const PARAMETERS: &str = "$parameters";
/// Marks the place of a tensor; holds its type.
const TENSOR: &str = "$tensor";

impl<O> ZeroOptimizer<O> {
    /// The state by names. All ranks call it.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`], [`ShardingError::State`]; [`ZeroError::Disagreement`] if ranks have other step
    /// counts for the same parameter; those of the group.
    pub fn to_state<B>(&self) -> Result<ShardState, ZeroError>
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

    /// What this rank needs of the tensors of a state whose [`rest`](ShardState::rest) is this, whatever the number of
    /// ranks that saved it.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`], [`ShardingError::State`].
    pub fn state_slots(&self, rest: &Json) -> Result<Vec<StateSlot>, ZeroError> {
        let exchange = self.prepared()?;
        let mut together = Together::new(
            exchange.layout(),
            Naming::of_pieces(exchange.layout()),
            HashMap::new(),
        );
        together.walk(rest, None, &mut Vec::new())?;
        Ok(together.slots)
    }

    /// Takes a state over, with the tensors that [`state_slots`](Self::state_slots) asks for.
    ///
    /// # Errors
    ///
    /// [`ShardingError::NotPrepared`], [`ShardingError::State`].
    pub fn load_state<B>(&mut self, state: ShardState, device: &B::Device) -> Result<(), ZeroError>
    where
        B: AutodiffBackend,
        O: Optimizer<Shards<B>, B>,
    {
        type Item<R, B> = <R as Record<B>>::Item<FullPrecisionSettings>;
        let exchange = self.prepared()?;
        let tensors = state.tensors.into_iter();
        let tensors = tensors.map(|tensor| (tensor.slot.name, tensor.data));
        let mut together = Together::new(
            exchange.layout(),
            Naming::of_pieces(exchange.layout()),
            tensors.collect(),
        );
        let tree = together.walk(&state.rest, None, &mut Vec::new())?;
        if let Some(name) = together.missing {
            return Err(refuse(format!("{name} is missing")).into());
        }
        let item: Item<O::Record, B> = tree.deserialized().map_err(refuse)?;
        let record = O::Record::from_item::<FullPrecisionSettings>(item, device);
        self.inner = self.inner.clone().load_record(record);
        Ok(())
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
