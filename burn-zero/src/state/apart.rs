//! A record without its tensors, and the tensors.

use core::ops::Range;
use std::collections::HashMap;

use burn::tensor::TensorData;
use ciborium::Value;
use serde_json::{Map, Value as Json};

use super::dtype::{in_file, stored, to_file};
use super::naming::{Known, Naming, Of};
use super::tensors::Pieces;
use super::{LOCAL, OPTIMIZER, PARAMETERS, TENSOR, WINDOW, refuse};
use crate::ZeroOptimizerError;
use crate::record::{Piece, TensorSpec};
use crate::reduce::Layout;

/// Takes a record apart.
pub(super) struct Apart<'a> {
    layout: &'a Layout,
    ids: HashMap<String, Known>,
    /// What was taken out.
    pub(super) taken: Pieces,
}

impl<'a> Apart<'a> {
    pub(super) fn new(layout: &'a Layout, naming: Naming) -> Self {
        Self {
            layout,
            ids: naming.by_id(),
            taken: Vec::new(),
        }
    }

    /// Rebuilds a value without its tensors.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::State`].
    pub(super) fn walk(
        &mut self,
        value: Value,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Json, ZeroOptimizerError> {
        Ok(match value {
            Value::Null => Json::Null,
            Value::Bool(value) => value.into(),
            Value::Text(value) => value.into(),
            // JSON would make null of it.
            Value::Float(value) if !value.is_finite() => {
                return Err(refuse(format!("{} is {value}", path.join("."))));
            }
            Value::Float(value) => value.into(),
            Value::Integer(value) => match i64::try_from(value) {
                Ok(value) => value.into(),
                Err(_) => u64::try_from(value).map_err(refuse)?.into(),
            },
            Value::Array(values) => {
                let mut found = Vec::new();
                for (index, value) in values.into_iter().enumerate() {
                    found.push(self.step(index.to_string(), value, of, path)?);
                }
                found.into()
            }
            Value::Map(fields) if is_tensor(&fields) => self.tensor(fields, of, path)?,
            Value::Map(fields) => self.map(fields, of, path)?,
            _ => return Err(refuse(format!("{} is of an unknown kind", path.join(".")))),
        })
    }

    fn step(
        &mut self,
        key: String,
        value: Value,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Json, ZeroOptimizerError> {
        path.push(key);
        let found = self.walk(value, of, path);
        path.pop();
        found
    }

    fn map(
        &mut self,
        fields: Vec<(Value, Value)>,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Json, ZeroOptimizerError> {
        let (mut named, mut shards, mut local) = (Map::new(), Map::new(), Map::new());
        for (key, value) in fields {
            let Value::Text(key) = key else {
                return Err(refuse(format!(
                    "{} has a key that is no text",
                    path.join(".")
                )));
            };
            let Some(&known) = self.ids.get(&key) else {
                let found = self.step(key.clone(), value, of, path)?;
                named.insert(key, found);
                continue;
            };
            let key = self.layout.parameters()[known.parameter].path.clone();
            let found = self.step(key.clone(), value, Some(known), path)?;
            match known.is {
                Of::Shard => shards.insert(key, found),
                Of::Rank => local.insert(key, found),
            };
        }
        for (key, found) in [(PARAMETERS, shards), (LOCAL, local)] {
            if !found.is_empty() {
                named.insert(key.to_owned(), found.into());
            }
        }
        Ok(named.into())
    }

    /// Takes a tensor out, as far as this rank has it for all.
    fn tensor(
        &mut self,
        fields: Vec<(Value, Value)>,
        of: Option<Known>,
        path: &[String],
    ) -> Result<Json, ZeroOptimizerError> {
        let data: TensorData = Value::Map(fields).deserialized().map_err(refuse)?;
        let name = path.join(".");
        let Some(of) = of else {
            return Err(refuse(format!("{name} is of no parameter")));
        };
        let place = serde_json::to_value(data.dtype).map_err(refuse)?;
        match of.is {
            Of::Shard => self.take_shard(&name, data, of.parameter)?,
            Of::Rank => {
                let name = format!("{WINDOW}/{}/{name}", self.layout.rank());
                let dtype = in_file(&name, data.dtype)?;
                let tensor = TensorSpec::new(name, dtype, data.shape.to_vec());
                self.taken.push((Piece::whole(tensor), to_file(data)));
            }
        }
        Ok(Json::Object(Map::from_iter([(TENSOR.to_owned(), place)])))
    }

    fn take_shard(
        &mut self,
        name: &str,
        data: TensorData,
        parameter: usize,
    ) -> Result<(), ZeroOptimizerError> {
        let held = self.layout.held(parameter);
        if data.num_elements() != held {
            let has = data.num_elements();
            let reason =
                format!("{name} has {has} elements, its parameter {held}: it cannot be cut");
            return Err(refuse(reason));
        }
        let name = format!("{OPTIMIZER}/{name}");
        let dtype = in_file(&name, data.dtype)?;
        let shape = self.layout.parameters()[parameter].shape.clone();
        let tensor = TensorSpec::new(name, dtype, shape);
        let size = tensor.element_bytes();
        let bytes = stored(data).bytes;
        for Range { start, end } in self.layout.shard(parameter).to_vec() {
            let at = self.layout.position(parameter, start) * size;
            let bytes = bytes[at..at + (end - start) * size].to_vec();
            let piece = Piece::new(tensor.clone(), start..end);
            self.taken.push((piece, bytes));
        }
        Ok(())
    }
}

fn is_tensor(fields: &[(Value, Value)]) -> bool {
    let has = |name: &str| fields.iter().any(|(key, _)| key.as_text() == Some(name));
    fields.len() == 3 && has("bytes") && has("shape") && has("dtype")
}
