//! The state of any of Burn's optimizers by names: a record is split into named tensors and a JSON tree, and joined again.
//!
//! Burn serializes an optimizer's record as a tree of maps whose keys are the ids of parameters, which differ between
//! processes. [`split`] replaces ids by paths and extracts the tensors, each with the ranges of its parameter that this rank
//! has; [`join`] is the inverse, for any layout. The rest of the tree is JSON:
//!
//! | in the JSON tree | stands for |
//! |---|---|
//! | `{"$parameters": {path: ..}}` | a map by the ids of parameters, whose tensors are cut over ranks: `optimizer/<place>` |
//! | `{"$local": {path: ..}}` | a map by the ids of parameters, whose tensors are this rank's alone: `window/<rank>/<place>` |
//! | `{"$tensor": type}` | a tensor, named by its place: the keys from the root, joined by dots |

use core::ops::Range;
use std::collections::HashMap;

use burn::module::ParamId;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::Backend;
use burn::tensor::{BoolStore, DType, TensorData};
use ciborium::Value;
use serde_json::{Map, Value as Json, json};

use crate::ZeroOptimizerError;
use crate::optimizer::{Parameters, shard_id};
use crate::record::{Dtype, TensorSpec};
use crate::reduce::Layout;

/// A record as Burn serializes it.
pub(crate) type Item<R, B> = <R as Record<B>>::Item<FullPrecisionSettings>;

/// The section of the optimizer's tensors, and that of windows that are not complete.
const OPTIMIZER: &str = "optimizer";
pub(crate) const WINDOW: &str = "window";

const PARAMETERS: &str = "$parameters";
const LOCAL: &str = "$local";
const TENSOR: &str = "$tensor";

/// The key of a parameter's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct StateKey {
    /// Position of the parameter.
    pub(crate) parameter: usize,
    /// Whether it is state of a layer around the [`ZeroOptimizer`](crate::ZeroOptimizer), which differs between ranks; otherwise
    /// it is the optimizer's, sharded over ranks.
    pub(crate) is_local: bool,
}

/// The ids in a record, with their keys.
pub(crate) struct StateIds(HashMap<String, StateKey>);

impl StateIds {
    /// For the record of an optimizer that steps on shards of this many parameters.
    pub(crate) fn of_shards(parameters: usize) -> Self {
        Self::of_ids((0..parameters).map(shard_id), false)
    }

    /// For the record of an optimizer that steps on a module with parameters of these ids.
    pub(crate) fn of_module(ids: &[ParamId]) -> Self {
        Self::of_ids(ids.iter().copied(), false)
    }

    /// For the record of layers around an optimizer that steps on shards: layers use the ids of the module's parameters.
    pub(crate) fn of_layers(parameters: &Parameters) -> Self {
        let Self(mut ids) = Self::of_shards(parameters.list.len());
        ids.extend(Self::of_ids(parameters.ids().into_iter(), true).0);
        Self(ids)
    }

    fn of_ids(ids: impl Iterator<Item = ParamId>, is_local: bool) -> Self {
        let ids = ids.enumerate().map(|(parameter, id)| {
            let key = StateKey {
                parameter,
                is_local,
            };
            (id.serialize(), key)
        });
        Self(ids.collect())
    }
}

/// The part of a record's tensor that a layout holds.
pub(crate) struct StateTensor {
    /// The whole tensor. The shape of a local tensor is empty until it is read from a record.
    pub(crate) spec: TensorSpec,
    /// The state that it belongs to.
    pub(crate) key: StateKey,
    /// The elements that the layout holds; all, if it is local.
    pub(crate) ranges: Vec<Range<usize>>,
}

/// Tensors, each with the concatenated elements of its ranges.
pub(crate) type Tensors = Vec<(StateTensor, Vec<u8>)>;

/// A tensor's shape, which [`join`] uses for local tensors only, and its elements.
pub(crate) type Elements = (Vec<usize>, Vec<u8>);

/// A record without its tensors, and the tensors with the elements that this rank saves: its shard of a sharded tensor, all of a
/// local one. Costs one copy of the tensors in host memory.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`].
pub(crate) fn split<B: Backend, R: Record<B>>(
    record: R,
    layout: &Layout,
    ids: &StateIds,
) -> Result<(Json, Tensors), ZeroOptimizerError> {
    let item: Item<R, B> = record.into_item();
    let tree = Value::serialized(&item).map_err(refuse)?;
    drop(item);
    let mut split = Split {
        layout,
        ids,
        path: Vec::new(),
        tensors: Vec::new(),
    };
    let tree = split.value(tree, None)?;
    Ok((tree, split.tensors))
}

struct Split<'a> {
    layout: &'a Layout,
    ids: &'a StateIds,
    path: Vec<String>,
    tensors: Tensors,
}

impl Split<'_> {
    fn value(&mut self, value: Value, of: Option<StateKey>) -> Result<Json, ZeroOptimizerError> {
        Ok(match value {
            Value::Null => Json::Null,
            Value::Bool(value) => value.into(),
            Value::Text(value) => value.into(),
            Value::Float(value) if value.is_finite() => value.into(),
            Value::Integer(value) => match i64::try_from(value) {
                Ok(value) => value.into(),
                Err(_) => u64::try_from(value).map_err(refuse)?.into(),
            },
            Value::Array(values) => {
                let values = values.into_iter().enumerate();
                let values = values.map(|(index, value)| self.child(index.to_string(), value, of));
                values.collect::<Result<Vec<_>, _>>()?.into()
            }
            Value::Map(mut fields) => match take_tensor(&mut fields)? {
                Some(data) => self.tensor(data, of)?,
                None => self.map(fields, of)?,
            },
            // A float that is not finite would become null in JSON.
            other => return Err(refuse(format!("{} is {other:?}", self.path.join(".")))),
        })
    }

    fn child(
        &mut self,
        key: String,
        value: Value,
        of: Option<StateKey>,
    ) -> Result<Json, ZeroOptimizerError> {
        self.path.push(key);
        let found = self.value(value, of);
        self.path.pop();
        found
    }

    fn map(
        &mut self,
        fields: Vec<(Value, Value)>,
        of: Option<StateKey>,
    ) -> Result<Json, ZeroOptimizerError> {
        let (mut named, mut shards, mut local) = (Map::new(), Map::new(), Map::new());
        for (key, value) in fields {
            let Value::Text(key) = key else {
                let path = self.path.join(".");
                return Err(refuse(format!("{path} has a key that is no text")));
            };
            let (map, key, of) = match self.ids.0.get(&key) {
                None => (&mut named, key, of),
                Some(known) => {
                    let path = self.layout.parameters()[known.parameter].path.clone();
                    let map = if known.is_local {
                        &mut local
                    } else {
                        &mut shards
                    };
                    (map, path, Some(*known))
                }
            };
            map.insert(key.clone(), self.child(key, value, of)?);
        }
        for (key, found) in [(PARAMETERS, shards), (LOCAL, local)] {
            if !found.is_empty() {
                named.insert(key.to_owned(), found.into());
            }
        }
        Ok(named.into())
    }

    /// Takes a tensor out.
    fn tensor(
        &mut self,
        data: TensorData,
        of: Option<StateKey>,
    ) -> Result<Json, ZeroOptimizerError> {
        let place = self.path.join(".");
        let Some(key) = of else {
            return Err(refuse(format!("{place} is of no parameter")));
        };
        let in_tree = json!({ TENSOR: data.dtype });
        let name = name(&place, key, self.layout);
        let dtype = in_file(&name, data.dtype)?;
        let (spec, ranges, held) = match key.is_local {
            true => {
                let spec = TensorSpec::new(name, dtype, data.shape.to_vec());
                let all = core::iter::once(0..data.num_elements()).collect();
                (spec, all, data.num_elements())
            }
            false => {
                let shape = self.layout.parameters()[key.parameter].shape.clone();
                let ranges = self.layout.shard(key.parameter).to_vec();
                let held = self.layout.held(key.parameter);
                (TensorSpec::new(name, dtype, shape), ranges, held)
            }
        };
        if data.num_elements() != held {
            let has = data.num_elements();
            return Err(refuse(format!(
                "{place} has {has} elements, its parameter {held}: it cannot be cut"
            )));
        }
        let mut bytes = to_file(data);
        if ranges.iter().map(Range::len).sum::<usize>() != held {
            bytes = cut(&bytes, &ranges, spec.element_bytes());
        }
        let tensor = StateTensor { spec, key, ranges };
        self.tensors.push((tensor, bytes));
        Ok(in_tree)
    }
}

/// A record from its tree and its tensors: `load` returns the elements that the layout holds, and is called in the
/// order of the tree. A tensor for which it returns none is null in the record. See [`to_record`].
///
/// # Errors
///
/// [`ZeroOptimizerError::State`], and those of `load`.
pub(crate) fn join<E: From<ZeroOptimizerError>>(
    tree: &Json,
    layout: &Layout,
    ids: &StateIds,
    load: impl FnMut(&StateTensor) -> Result<Option<Elements>, E>,
) -> Result<Value, E> {
    let paths = layout.parameters().iter().enumerate();
    let ids = ids.0.iter();
    let mut join = Join {
        layout,
        parameters: paths.map(|(index, it)| (&*it.path, index)).collect(),
        ids: ids.map(|(id, key)| (*key, &**id)).collect(),
        path: Vec::new(),
        load,
    };
    join.value(tree, None)
}

/// The record of a tree that [`join`] has made. Costs a copy of the tensors in host memory.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`].
pub(crate) fn to_record<B: Backend, R: Record<B>>(
    tree: Value,
    device: &B::Device,
) -> Result<R, ZeroOptimizerError> {
    let item: Item<R, B> = tree.deserialized().map_err(refuse)?;
    drop(tree);
    Ok(R::from_item(item, device))
}

struct Join<'a, F> {
    layout: &'a Layout,
    parameters: HashMap<&'a str, usize>,
    ids: HashMap<StateKey, &'a str>,
    path: Vec<String>,
    load: F,
}

impl<E, F> Join<'_, F>
where
    E: From<ZeroOptimizerError>,
    F: FnMut(&StateTensor) -> Result<Option<Elements>, E>,
{
    fn value(&mut self, value: &Json, of: Option<StateKey>) -> Result<Value, E> {
        match value {
            Json::Array(values) => {
                let values = values.iter().enumerate();
                let values = values.map(|(index, value)| self.child(&index.to_string(), value, of));
                Ok(Value::Array(values.collect::<Result<_, _>>()?))
            }
            Json::Object(fields) => match fields.get(TENSOR) {
                Some(dtype) => self.tensor(dtype, of),
                None => self.map(fields, of),
            },
            leaf => Ok(Value::serialized(leaf).map_err(refuse)?),
        }
    }

    fn child(&mut self, key: &str, value: &Json, of: Option<StateKey>) -> Result<Value, E> {
        self.path.push(key.to_owned());
        let found = self.value(value, of);
        self.path.pop();
        found
    }

    fn map(&mut self, fields: &Map<String, Json>, of: Option<StateKey>) -> Result<Value, E> {
        let mut found = Vec::new();
        for (key, value) in fields {
            let is_local = key == LOCAL;
            if !is_local && key != PARAMETERS {
                let value = self.child(key, value, of)?;
                found.push((Value::Text(self.key(key, of)), value));
                continue;
            }
            for (path, value) in value.as_object().into_iter().flatten() {
                let known = self.parameters.get(&**path);
                let &parameter =
                    known.ok_or_else(|| refuse(format!("the model has no parameter {path}")))?;
                if !is_local && self.layout.held(parameter) == 0 {
                    continue;
                }
                let key = StateKey {
                    parameter,
                    is_local,
                };
                let value = self.child(path, value, Some(key))?;
                // State of another rank.
                if is_local && value == Value::Null {
                    continue;
                }
                found.push((Value::Text(self.ids[&key].to_owned()), value));
            }
        }
        Ok(Value::Map(found))
    }

    /// The key of an entry. Burn's records name the number of dimensions of a parameter's state, such as `Rank2`: here the shard's.
    fn key(&self, key: &str, of: Option<StateKey>) -> String {
        let dims = key.strip_prefix("Rank").map(str::parse::<usize>);
        match (of, dims) {
            (Some(of), Some(Ok(_))) if !of.is_local => {
                format!("Rank{}", self.layout.shard_shape(of.parameter).len())
            }
            _ => key.to_owned(),
        }
    }

    fn tensor(&mut self, dtype: &Json, of: Option<StateKey>) -> Result<Value, E> {
        let place = self.path.join(".");
        let Some(key) = of else {
            return Err(refuse(format!("{place} is of no parameter")).into());
        };
        let dtype: DType = serde_json::from_value(dtype.clone()).map_err(refuse)?;
        let name = name(&place, key, self.layout);
        let in_file = in_file(&name, dtype)?;
        let (shape, ranges) = match key.is_local {
            true => (Vec::new(), Vec::new()),
            false => {
                let shape = self.layout.parameters()[key.parameter].shape.clone();
                (shape, held(self.layout, key.parameter))
            }
        };
        let tensor = StateTensor {
            spec: TensorSpec::new(name, in_file, shape),
            key,
            ranges,
        };
        let Some((shape, bytes)) = (self.load)(&tensor)? else {
            return Ok(Value::Null);
        };
        let shape = match key.is_local {
            true => shape,
            false => self.layout.shard_shape(key.parameter),
        };
        let wanted = shape.iter().product::<usize>() * tensor.spec.element_bytes();
        if bytes.len() != wanted {
            let (name, has) = (tensor.spec.name, bytes.len());
            return Err(refuse(format!("{name} has {has} bytes, but {wanted} are needed")).into());
        }
        let shape = Value::serialized(&shape).map_err(refuse)?;
        let dtype = Value::serialized(&on_host(dtype)).map_err(refuse)?;
        let fields = [(BYTES, Value::Bytes(bytes)), (SHAPE, shape), (DTYPE, dtype)];
        let fields = fields.map(|(key, value)| (Value::Text(key.to_owned()), value));
        Ok(Value::Map(fields.into()))
    }
}

/// The fields of a serialized [`TensorData`].
const BYTES: &str = "bytes";
const SHAPE: &str = "shape";
const DTYPE: &str = "dtype";

/// The tensor, if these are the fields of one, without a copy.
fn take_tensor(fields: &mut [(Value, Value)]) -> Result<Option<TensorData>, ZeroOptimizerError> {
    let at = |name: &str| {
        fields
            .iter()
            .position(|(key, _)| key.as_text() == Some(name))
    };
    let (3, Some(bytes), Some(shape), Some(dtype)) =
        (fields.len(), at(BYTES), at(SHAPE), at(DTYPE))
    else {
        return Ok(None);
    };
    let shape: Vec<usize> = fields[shape].1.deserialized().map_err(refuse)?;
    let dtype: DType = fields[dtype].1.deserialized().map_err(refuse)?;
    let bytes = core::mem::replace(&mut fields[bytes].1, Value::Null);
    let bytes = bytes.into_bytes();
    let bytes = bytes.map_err(|other| refuse(format!("the bytes of a tensor are {other:?}")))?;
    Ok(Some(TensorData::from_bytes_vec(bytes, shape, dtype)))
}

/// The name of the tensor at a place of the tree.
fn name(place: &str, key: StateKey, layout: &Layout) -> String {
    match key.is_local {
        true => format!("{WINDOW}/{}/{place}", layout.rank()),
        false => format!("{OPTIMIZER}/{place}"),
    }
}

/// The elements of a parameter that a layout holds.
fn held(layout: &Layout, parameter: usize) -> Vec<Range<usize>> {
    match layout.holds_all() {
        true => core::iter::once(0..layout.held(parameter)).collect(),
        false => layout.shard(parameter).to_vec(),
    }
}

/// The elements in `ranges`, concatenated.
pub(crate) fn cut(bytes: &[u8], ranges: &[Range<usize>], element_bytes: usize) -> Vec<u8> {
    let ranges = ranges.iter();
    let parts = ranges.map(|range| &bytes[range.start * element_bytes..range.end * element_bytes]);
    parts.collect::<Vec<_>>().concat()
}

/// The type in files; bools are stored as one byte each, whatever their type on the device.
///
/// # Errors
///
/// [`ZeroOptimizerError::State`] for quantized tensors and others that safetensors has no type for.
pub(crate) fn in_file(name: &str, dtype: DType) -> Result<Dtype, ZeroOptimizerError> {
    Ok(match dtype {
        DType::F64 => Dtype::F64,
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::I64 => Dtype::I64,
        DType::I32 => Dtype::I32,
        DType::I16 => Dtype::I16,
        DType::I8 => Dtype::I8,
        DType::U64 => Dtype::U64,
        DType::U32 => Dtype::U32,
        DType::U16 => Dtype::U16,
        DType::U8 => Dtype::U8,
        DType::Bool(_) => Dtype::BOOL,
        other => {
            return Err(refuse(format!(
                "{name} is {other:?}, which records do not hold"
            )));
        }
    })
}

/// The type of a tensor's data on the host, as it is in files.
fn on_host(dtype: DType) -> DType {
    match dtype {
        DType::Bool(_) => DType::Bool(BoolStore::Native),
        other => other,
    }
}

/// The bytes that go into the file.
pub(crate) fn to_file(data: TensorData) -> Vec<u8> {
    let data = match data.dtype {
        dtype @ DType::Bool(BoolStore::U8 | BoolStore::U32) => data.convert_dtype(on_host(dtype)),
        _ => data,
    };
    let bytes = data.bytes.try_into_vec::<u8>();
    bytes.unwrap_or_else(|bytes| bytes.to_vec())
}

/// The tensor data from the bytes of a file.
pub(crate) fn from_file(bytes: Vec<u8>, shape: Vec<usize>, dtype: DType) -> TensorData {
    TensorData::from_bytes_vec(bytes, shape, on_host(dtype))
}

/// Bytes of all tensors in a record, such as an optimizer's, to compare with an estimate.
///
/// Floats count as f32, as records hold them. Costs a temporary copy of the tensors on the host.
///
/// ```
/// use burn::{backend::Autodiff, nn, optim::{AdamWConfig, GradientsParams, Optimizer}, prelude::*};
/// use burn_zero::tensor_bytes;
///
/// type B = Autodiff<burn_flex::Flex>;
/// let device = Default::default();
/// let model: nn::Linear<B> = nn::LinearConfig::new(4, 3).init(&device);
/// let mut optimizer = AdamWConfig::new().init();
/// let loss = model.forward(Tensor::<B, 2>::ones([2, 4], &device)).mean();
/// let gradients = GradientsParams::from_grads(loss.backward(), &model);
/// let _ = optimizer.step(1e-3, model, gradients);
/// assert_eq!(tensor_bytes::<B, _>(optimizer.to_record())?, 8 * (4 * 3 + 3)); // two moments in f32
/// # Ok::<(), burn_zero::ZeroOptimizerError>(())
/// ```
///
/// # Errors
///
/// [`ZeroOptimizerError::State`] for a record that cannot be serialized.
pub fn tensor_bytes<B: Backend, R: Record<B>>(record: R) -> Result<u64, ZeroOptimizerError> {
    // Only elements of tensors are bytes in such a tree.
    fn count(value: &Value) -> u64 {
        match value {
            Value::Bytes(bytes) => bytes.len() as u64,
            Value::Array(values) => values.iter().map(count).sum(),
            Value::Map(fields) => fields.iter().map(|(_, value)| count(value)).sum(),
            _ => 0,
        }
    }
    let item = record.into_item::<FullPrecisionSettings>();
    let tree = Value::serialized(&item).map_err(refuse)?;
    Ok(count(&tree))
}

pub(crate) fn refuse(reason: impl ToString) -> ZeroOptimizerError {
    ZeroOptimizerError::State {
        reason: reason.to_string(),
    }
}
