//! A record without its tensors, and the tensors.

use std::collections::HashMap;

use burn::tensor::TensorData;
use ciborium::Value;
use serde_json::{Map, Value as Json};

use super::naming::Naming;
use super::{PARAMETERS, StateSlot, StateTensor, TENSOR, refuse};
use crate::ShardingError;
use crate::reduce::Layout;

/// Takes a record apart.
pub(super) struct Apart<'a> {
    layout: &'a Layout,
    /// Positions of parameters, by the ids that records know their pieces by.
    ids: HashMap<String, usize>,
    /// What was taken out.
    pub(super) tensors: Vec<StateTensor>,
}

impl<'a> Apart<'a> {
    pub(super) fn new(layout: &'a Layout, naming: Naming) -> Self {
        Self {
            layout,
            ids: naming.positions(),
            tensors: Vec::new(),
        }
    }

    /// Rebuilds a value without its tensors.
    pub(super) fn walk(
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
