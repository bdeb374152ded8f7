//! A record from its tensors and the rest.

use std::collections::HashMap;

use burn::tensor::{DType, TensorData};
use ciborium::Value;
use serde_json::{Map, Value as Json};

use super::naming::Naming;
use super::{PARAMETERS, StateSlot, TENSOR, refuse};
use crate::ShardingError;
use crate::reduce::Layout;

/// Puts a record together.
pub(super) struct Together<'a> {
    layout: &'a Layout,
    naming: Naming,
    index: HashMap<&'a str, usize>,
    tensors: HashMap<String, TensorData>,
    /// The tensors that were asked for.
    pub(super) slots: Vec<StateSlot>,
    /// Their parameters.
    pub(super) parameters: Vec<usize>,
    /// The first that was not there.
    pub(super) missing: Option<String>,
}

impl<'a> Together<'a> {
    pub(super) fn new(
        layout: &'a Layout,
        naming: Naming,
        tensors: HashMap<String, TensorData>,
    ) -> Self {
        let parameters = layout.parameters().iter().enumerate();
        Self {
            layout,
            naming,
            index: parameters
                .map(|(index, known)| (&*known.path, index))
                .collect(),
            tensors,
            slots: Vec::new(),
            parameters: Vec::new(),
            missing: None,
        }
    }

    /// Rebuilds a value with its tensors.
    pub(super) fn walk(
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
                let key = self.naming.key(key, parameter);
                found.push((Value::Text(key), value));
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
                found.push((Value::Text(self.naming.id(index).to_owned()), value));
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
        self.parameters.push(parameter);
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
