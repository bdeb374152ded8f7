//! The state of the wrapped optimizer, taken apart by names: what sharded records are made of.
//!
//! A record of any of Burn's optimizers is a tree of maps in which parameters are known by ids. Here the ids become
//! paths, and the tensors are taken out, so that any number of ranks can take their parts of them.

use core::ops::Range;
use std::collections::HashMap;

use burn::optim::Optimizer;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::{DType, TensorData, backend::AutodiffBackend};
use ciborium::Value;
use serde_json::{Map, Value as Json};

use super::shards::{Shards, piece_id};
use super::zero_optimizer::ZeroOptimizer;
use crate::reduce::{Exchange, Layout};
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
        let mut apart = Apart {
            layout: exchange.layout(),
            ids: ids(exchange.layout()),
            tensors: Vec::new(),
        };
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
        let mut together = Together::new(exchange.layout(), HashMap::new());
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
        let mut together = Together::new(exchange.layout(), tensors.collect());
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

/// Positions of parameters, by the ids that records know their pieces by.
fn ids(layout: &Layout) -> HashMap<String, usize> {
    (0..layout.parameters().len())
        .map(|index| (piece_id(index).serialize(), index))
        .collect()
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

/// Takes a record apart.
struct Apart<'a> {
    layout: &'a Layout,
    ids: HashMap<String, usize>,
    tensors: Vec<StateTensor>,
}

impl Apart<'_> {
    fn walk(
        &mut self,
        value: Value,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Json, ShardingError> {
        Ok(match value {
            Value::Null => Json::Null,
            Value::Bool(value) => value.into(),
            Value::Text(value) => value.into(),
            Value::Float(value) => value.into(),
            Value::Integer(value) => match i64::try_from(value) {
                Ok(value) => value.into(),
                Err(_) => u64::try_from(value).map_err(refuse)?.into(),
            },
            Value::Array(values) => {
                let mut found = Vec::new();
                for (index, value) in values.into_iter().enumerate() {
                    found.push(self.step(index.to_string(), value, parameter, path)?);
                }
                found.into()
            }
            Value::Map(fields) if is_tensor(&fields) => self.tensor(fields, parameter, path)?,
            Value::Map(fields) => self.map(fields, parameter, path)?,
            _ => return Err(refuse(format!("{} is of an unknown kind", path.join(".")))),
        })
    }

    fn step(
        &mut self,
        key: String,
        value: Value,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Json, ShardingError> {
        path.push(key);
        let found = self.walk(value, parameter, path);
        path.pop();
        found
    }

    fn map(
        &mut self,
        fields: Vec<(Value, Value)>,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Json, ShardingError> {
        let (mut named, mut parameters) = (Map::new(), Map::new());
        for (key, value) in fields {
            let Value::Text(key) = key else {
                return Err(refuse(format!(
                    "{} has a key that is no text",
                    path.join(".")
                )));
            };
            match self.ids.get(&key) {
                Some(&index) => {
                    let key = self.layout.parameters()[index].path.clone();
                    let found = self.step(key.clone(), value, Some(index), path)?;
                    parameters.insert(key, found);
                }
                None => {
                    let found = self.step(key.clone(), value, parameter, path)?;
                    named.insert(key, found);
                }
            }
        }
        if !parameters.is_empty() {
            named.insert(PARAMETERS.to_owned(), parameters.into());
        }
        Ok(named.into())
    }

    /// Takes a tensor out, as far as it is of this rank's shard.
    fn tensor(
        &mut self,
        fields: Vec<(Value, Value)>,
        parameter: Option<usize>,
        path: &[String],
    ) -> Result<Json, ShardingError> {
        let data: TensorData = Value::Map(fields).deserialized().map_err(refuse)?;
        let name = path.join(".");
        let dtype = data.dtype;
        let place = Value::serialized(&dtype).map_err(refuse)?;
        let Some(parameter) = parameter else {
            return Err(refuse(format!("{name} is of no parameter")));
        };
        let known = &self.layout.parameters()[parameter];
        if data.num_elements() != self.layout.held(parameter) {
            let (has, of) = (data.num_elements(), self.layout.held(parameter));
            let reason = format!("{name} has {has} elements, its parameter {of}: it cannot be cut");
            return Err(refuse(reason));
        }
        let ranges = self.layout.shard(parameter).to_vec();
        let size = dtype.size();
        let mut bytes = Vec::new();
        for range in &ranges {
            let start = self.layout.position(parameter, range.start);
            bytes.extend_from_slice(&data.bytes[start * size..(start + range.len()) * size]);
        }
        let elements = bytes.len() / size;
        if elements > 0 {
            let slot = StateSlot {
                name,
                shape: known.shape.clone(),
                dtype,
                ranges,
            };
            let data = TensorData::from_bytes_vec(bytes, [elements], dtype);
            self.tensors.push(StateTensor { slot, data });
        }
        let place = self.walk(place, None, &mut Vec::new())?;
        Ok(Json::Object(Map::from_iter([(TENSOR.to_owned(), place)])))
    }
}

fn is_tensor(fields: &[(Value, Value)]) -> bool {
    let has = |name: &str| fields.iter().any(|(key, _)| key.as_text() == Some(name));
    fields.len() == 3 && has("bytes") && has("shape") && has("dtype")
}

/// Puts a record together.
struct Together<'a> {
    layout: &'a Layout,
    index: HashMap<&'a str, usize>,
    tensors: HashMap<String, TensorData>,
    /// The tensors that were asked for.
    slots: Vec<StateSlot>,
    /// The first that was not there.
    missing: Option<String>,
}

impl<'a> Together<'a> {
    fn new(layout: &'a Layout, tensors: HashMap<String, TensorData>) -> Self {
        let parameters = layout.parameters().iter().enumerate();
        Self {
            layout,
            index: parameters
                .map(|(index, known)| (&*known.path, index))
                .collect(),
            tensors,
            slots: Vec::new(),
            missing: None,
        }
    }

    fn walk(
        &mut self,
        value: &Json,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Value, ShardingError> {
        Ok(match value {
            Json::Array(values) => {
                let mut found = Vec::new();
                for (index, value) in values.iter().enumerate() {
                    found.push(self.step(&index.to_string(), value, parameter, path)?);
                }
                Value::Array(found)
            }
            Json::Object(fields) => match fields.get(TENSOR) {
                Some(dtype) => self.tensor(dtype, parameter, path)?,
                None => self.map(fields, parameter, path)?,
            },
            leaf => Value::serialized(leaf).map_err(refuse)?,
        })
    }

    fn step(
        &mut self,
        key: &str,
        value: &Json,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Value, ShardingError> {
        path.push(key.to_owned());
        let found = self.walk(value, parameter, path);
        path.pop();
        found
    }

    fn map(
        &mut self,
        fields: &Map<String, Json>,
        parameter: Option<usize>,
        path: &mut Vec<String>,
    ) -> Result<Value, ShardingError> {
        let mut found = Vec::new();
        for (key, value) in fields {
            let Some(parameters) = value.as_object().filter(|_| key == PARAMETERS) else {
                let value = self.step(key, value, parameter, path)?;
                found.push((Value::Text(key.clone()), value));
                continue;
            };
            for (key, value) in parameters {
                let Some(&index) = self.index.get(&**key) else {
                    return Err(refuse(format!("the model has no parameter {key}")));
                };
                if self.layout.held(index) == 0 {
                    continue;
                }
                let value = self.step(key, value, Some(index), path)?;
                found.push((Value::Text(piece_id(index).serialize()), value));
            }
        }
        Ok(Value::Map(found))
    }

    fn tensor(
        &mut self,
        dtype: &Json,
        parameter: Option<usize>,
        path: &[String],
    ) -> Result<Value, ShardingError> {
        let name = path.join(".");
        let Some(parameter) = parameter else {
            return Err(refuse(format!("{name} is of no parameter")));
        };
        let dtype: DType = serde_json::from_value(dtype.clone()).map_err(refuse)?;
        let known = &self.layout.parameters()[parameter];
        let held = self.layout.held(parameter);
        let ranges = match self.layout.holds_all() {
            true => core::iter::once(0..held).collect(),
            false => self.layout.shard(parameter).to_vec(),
        };
        self.slots.push(StateSlot {
            name: name.clone(),
            shape: known.shape.clone(),
            dtype,
            ranges,
        });
        let Some(data) = self.tensors.remove(&name) else {
            self.missing.get_or_insert(name);
            return Ok(Value::Null);
        };
        if data.num_elements() != held || data.dtype != dtype {
            let (found, has) = (data.num_elements(), data.dtype);
            let reason =
                format!("{name} is {found} of {has:?}, but {held} of {dtype:?} are needed");
            return Err(refuse(reason));
        }
        let shape = self.layout.piece_shape(parameter);
        let data = TensorData::from_bytes(data.bytes, shape, dtype);
        Value::serialized(&data).map_err(refuse)
    }
}
