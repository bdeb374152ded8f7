//! A record from its tensors and the rest.

use std::collections::HashMap;

use burn::tensor::{DType, TensorData};
use ciborium::Value;
use serde_json::{Map, Value as Json};

use super::dtype::{from_file, in_file};
use super::naming::{Known, Naming, Of};
use super::tensors::Loaded;
use super::{LOCAL, OPTIMIZER, PARAMETERS, TENSOR, WINDOW, refuse};
use crate::ZeroOptimizerError;
use crate::record::{Piece, TensorSpec};
use crate::reduce::Layout;

/// Puts a record together: once to find out which tensors it takes, and once with them.
pub(super) struct Together<'a> {
    layout: &'a Layout,
    parameters: HashMap<&'a str, usize>,
    ids: HashMap<Known, String>,
    source: Source,
}

/// Where tensors come from.
pub(super) enum Source {
    /// They are only asked for.
    Wanted {
        /// What was asked for, and the parameters that it is of.
        pieces: Vec<(usize, Piece)>,
        /// Shapes of the tensors that are this rank's alone.
        local: HashMap<String, Vec<usize>>,
    },
    /// By names in the record.
    Loaded(HashMap<String, Loaded>),
}

impl<'a> Together<'a> {
    pub(super) fn new(layout: &'a Layout, naming: Naming, source: Source) -> Self {
        let known = layout.parameters().iter().enumerate();
        Self {
            layout,
            parameters: known.map(|(index, known)| (&*known.path, index)).collect(),
            ids: naming.ids(),
            source,
        }
    }

    /// The pieces that were asked for, and their parameters.
    pub(super) fn into_wanted(self) -> Vec<(usize, Piece)> {
        match self.source {
            Source::Wanted { pieces, .. } => pieces,
            Source::Loaded(_) => Vec::new(),
        }
    }

    /// Rebuilds a value with its tensors.
    ///
    /// # Errors
    ///
    /// [`ZeroOptimizerError::State`].
    pub(super) fn walk(
        &mut self,
        value: &Json,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Value, ZeroOptimizerError> {
        Ok(match value {
            Json::Array(values) => {
                let mut found = Vec::new();
                for (index, value) in values.iter().enumerate() {
                    found.push(self.step(&index.to_string(), value, of, path)?);
                }
                Value::Array(found)
            }
            Json::Object(fields) => match fields.get(TENSOR) {
                Some(dtype) => self.tensor(dtype, of, path)?,
                None => self.map(fields, of, path)?,
            },
            leaf => Value::serialized(leaf).map_err(refuse)?,
        })
    }

    fn step(
        &mut self,
        key: &str,
        value: &Json,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Value, ZeroOptimizerError> {
        path.push(key.to_owned());
        let found = self.walk(value, of, path);
        path.pop();
        found
    }

    fn map(
        &mut self,
        fields: &Map<String, Json>,
        of: Option<Known>,
        path: &mut Vec<String>,
    ) -> Result<Value, ZeroOptimizerError> {
        let mut found = Vec::new();
        for (key, value) in fields {
            let is = match &**key {
                PARAMETERS => Of::Shard,
                LOCAL => Of::Rank,
                _ => {
                    let value = self.step(key, value, of, path)?;
                    found.push((Value::Text(self.key(key, of)), value));
                    continue;
                }
            };
            for (path_of, value) in value.as_object().into_iter().flatten() {
                let Some(&parameter) = self.parameters.get(&**path_of) else {
                    return Err(refuse(format!("the model has no parameter {path_of}")));
                };
                if is == Of::Shard && self.layout.held(parameter) == 0 {
                    continue;
                }
                let known = Known { parameter, is };
                let value = self.step(path_of, value, Some(known), path)?;
                // Another rank's, which this one has nothing of.
                if is == Of::Rank && value == Value::Null {
                    continue;
                }
                let id = self.ids[&known].clone();
                found.push((Value::Text(id), value));
            }
        }
        Ok(Value::Map(found))
    }

    /// The key of an entry. Burn's records say in how many dimensions the state of a parameter is, `Rank2`: those of its piece.
    fn key(&self, key: &str, of: Option<Known>) -> String {
        let dims = key.strip_prefix("Rank").map(str::parse::<usize>);
        match (of, dims) {
            (Some(known), Some(Ok(_))) if known.is == Of::Shard => {
                format!("Rank{}", self.layout.piece_shape(known.parameter).len())
            }
            _ => key.to_owned(),
        }
    }

    fn tensor(
        &mut self,
        dtype: &Json,
        of: Option<Known>,
        path: &[String],
    ) -> Result<Value, ZeroOptimizerError> {
        let name = path.join(".");
        let Some(Known { parameter, is }) = of else {
            return Err(refuse(format!("{name} is of no parameter")));
        };
        let dtype: DType = serde_json::from_value(dtype.clone()).map_err(refuse)?;
        let data = match is {
            Of::Shard => self.shard(format!("{OPTIMIZER}/{name}"), dtype, parameter)?,
            Of::Rank => {
                let name = format!("{WINDOW}/{}/{name}", self.layout.rank());
                self.local(name, dtype, parameter)?
            }
        };
        match data {
            Some(data) => Value::serialized(&data).map_err(refuse),
            None => Ok(Value::Null),
        }
    }

    /// This rank's shard of a tensor.
    fn shard(
        &mut self,
        name: String,
        dtype: DType,
        parameter: usize,
    ) -> Result<Option<TensorData>, ZeroOptimizerError> {
        let known = &self.layout.parameters()[parameter];
        let held = self.layout.held(parameter);
        let tensor = TensorSpec::new(name.clone(), in_file(&name, dtype)?, known.shape.clone());
        match &mut self.source {
            Source::Wanted { pieces, .. } => {
                let ranges = match self.layout.holds_all() {
                    true => core::slice::from_ref(&(0..held)).to_vec(),
                    false => self.layout.shard(parameter).to_vec(),
                };
                let ranges = ranges.into_iter();
                pieces.extend(ranges.map(|range| (parameter, Piece::new(tensor.clone(), range))));
                Ok(None)
            }
            Source::Loaded(tensors) => {
                let loaded = tensors.remove(&name).unwrap_or_default();
                let has = loaded.bytes.len() / tensor.element_bytes();
                if has != held {
                    return Err(refuse(format!(
                        "{name} has {has} elements, but {held} are needed"
                    )));
                }
                let shape = self.layout.piece_shape(parameter);
                Ok(Some(from_file(loaded.bytes, shape, dtype)))
            }
        }
    }

    /// A tensor that is this rank's alone; `None` if it has none.
    fn local(
        &mut self,
        name: String,
        dtype: DType,
        parameter: usize,
    ) -> Result<Option<TensorData>, ZeroOptimizerError> {
        match &mut self.source {
            Source::Wanted { pieces, local } => {
                if let Some(shape) = local.remove(&name) {
                    let tensor = TensorSpec::new(name.clone(), in_file(&name, dtype)?, shape);
                    pieces.push((parameter, Piece::whole(tensor)));
                }
                Ok(None)
            }
            Source::Loaded(tensors) => Ok(tensors
                .remove(&name)
                .map(|loaded| from_file(loaded.bytes, loaded.shape, dtype))),
        }
    }
}
