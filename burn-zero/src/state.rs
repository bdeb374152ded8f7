//! The state of any of Burn's optimizers by names: a record is split into named tensors and a JSON
//! tree, and joined again.
//!
//! Burn serializes an optimizer's record as a tree of maps whose keys are the ids of parameters,
//! which differ between processes. [`split`] replaces ids by paths and extracts the tensors, each
//! with the ranges of its parameter that this rank has; [`join`] is the inverse, for any layout. A
//! tensor that belongs to no shard is refused. The rest of the tree is JSON:
//!
//! | in the JSON tree | stands for |
//! |---|---|
//! | `"$parameter path": ..` | state under the id of a parameter, whose tensors are cut over ranks: `optimizer/<place>` |
//! | `{"$tensor": type}` | a tensor, named by its place: the keys from the root, joined by dots |
//!
//! A [`burn_update::Update`] keeps an optimizer's record as a tree whose values say what they are
//! (`{"Map": {..}}`). Its tensors are named as in the optimizer's record itself:
//! `first.weight.V1.Rank1.momentum.moment_2`, or `biases/first.bias.V1..` in a group of parameters.
//! No path of a parameter has a slash, so names of two groups differ. The averages of the weights,
//! which an update keeps by path, are `average/first.weight`.

use core::borrow::Borrow;
use core::ops::Range;
use std::collections::{HashMap, HashSet};

use burn::module::ParamId;
use burn::record::{FullPrecisionSettings, Record};
use burn::tensor::backend::Backend;
use burn::tensor::{BoolStore, DType, Tensor, TensorData};
use burn_update::tensor_fields::{NAMES, are_a_tensor, into_tensor};
use ciborium::Value;
use serde::Serialize;
use serde_json::Value as Json;

use crate::error::ShardingFault;
use crate::record::{Dtype, TensorSpec};
use crate::reduce::{Layout, ParameterSpec};
use crate::update::shard_id;

/// A record as Burn serializes it.
pub(crate) type Item<R, B> = <R as Record<B>>::Item<FullPrecisionSettings>;

const PARAMETER: &str = "$parameter ";
const TENSOR: &str = "$tensor";

/// The ids in a record, with the positions of their parameters; `None` for a parameter that is not
/// trained, whose state is left out.
pub(crate) type StateIds = HashMap<String, Option<usize>>;

/// The ids of parameters, which are given in their order.
pub(crate) fn state_ids(ids: impl IntoIterator<Item = ParamId>) -> StateIds {
    let ids = ids.into_iter().map(|id| id.serialize());
    ids.zip((0..).map(Some)).collect()
}

/// The ids in the record of an optimizer that steps on shards.
pub(crate) fn ids_of_shards(layout: &Layout) -> StateIds {
    state_ids((0..layout.parameters().len()).map(shard_id))
}

/// The part of a record's tensor that a layout holds.
pub(crate) struct StateTensor {
    /// The whole tensor.
    pub(crate) spec: TensorSpec,
    /// Its name in records that were saved while names had all keys of an update's tree.
    pub(crate) former_name: String,
    /// Position of the parameter that it belongs to.
    pub(crate) parameter: usize,
    /// The elements that the layout holds.
    pub(crate) ranges: Vec<Range<usize>>,
}

/// Tensors, each with the concatenated elements of its ranges.
pub(crate) type Tensors = Vec<(StateTensor, Vec<u8>)>;

/// A record without its tensors, and the tensors with the elements that this rank saves. Costs two
/// copies of the tensors in host memory at its peak: the serialized record and the tree that is
/// made of it. One of them is returned.
///
/// # Errors
///
/// [`ShardingFault::State`].
pub(crate) fn split<B: Backend, R: Record<B>>(
    record: R,
    layout: &Layout,
    ids: &StateIds,
) -> Result<(Json, Tensors), ShardingFault> {
    let item: Item<R, B> = record.into_item();
    let tree = Value::serialized(&item).map_err(refuse)?;
    drop(item);
    let (mut tensors, mut names) = (Vec::new(), HashSet::new());
    let paths = positions(layout);
    let rename = |place: &[String], id: &str, of| {
        if let Some(path) = averaged(place, id) {
            let of = paths.get(path).copied();
            return Ok(of.map(|parameter| (id.to_owned(), Some(parameter))));
        }
        let Some(known) = ids.get(id) else {
            return Ok(Some((id.to_owned(), of)));
        };
        Ok(known.map(|parameter| {
            let path = &layout.parameters()[parameter].path;
            (format!("{PARAMETER}{path}"), Some(parameter))
        }))
    };
    let take = |place: &[String], parameter: usize, fields: Fields| {
        let data = into_tensor(fields).map_err(refuse)?;
        let in_tree = Value::serialized(&data.dtype).map_err(refuse)?;
        let tensor = at_place(place, parameter, data.dtype, layout)?;
        let (has, held) = (data.num_elements(), layout.held(parameter));
        if has != held {
            return Err(refuse(format!(
                "{} has {has} elements, its parameter {held}: it cannot be cut",
                name_at(place)
            )));
        }
        if !names.insert(tensor.spec.name.clone()) {
            return Err(refuse(format!(
                "two tensors are named {}",
                tensor.spec.name
            )));
        }
        let mut bytes = to_file(data);
        if Some(held) == tensor.spec.elements() {
            bytes = cut(bytes, &tensor.ranges, &tensor.spec);
        }
        tensors.push((tensor, bytes));
        let fields = vec![(Value::Text(TENSOR.to_owned()), in_tree)];
        Ok(Some(Value::Map(fields)))
    };
    let tree = Walk {
        rename,
        replace: take,
        place: Vec::new(),
    }
    .value(tree, None)?;
    Ok((serde_json::to_value(tree).map_err(refuse)?, tensors))
}

/// A record from its tree and its tensors: `load` returns the elements that the layout holds, and
/// is called in the order of the tree. State whose tensor `load` does not return is left out. See
/// [`to_record`].
///
/// # Errors
///
/// [`ShardingFault::State`], and those of `load`.
pub(crate) fn join<E: From<ShardingFault>>(
    tree: &Json,
    layout: &Layout,
    ids: &StateIds,
    mut load: impl FnMut(&StateTensor) -> Result<Option<Vec<u8>>, E>,
) -> Result<Value, E> {
    let paths = positions(layout);
    let ids: HashMap<_, _> = ids.iter().map(|(id, index)| (index.as_ref(), id)).collect();
    let held = |path: &str| {
        let parameter = paths.get(path).copied();
        parameter.filter(|parameter| layout.held(*parameter) > 0)
    };
    let rename = |place: &[String], key: &str, of: Option<usize>| {
        if let Some(path) = averaged(place, key) {
            return Ok(held(path).map(|parameter| (key.to_owned(), Some(parameter))));
        }
        let Some(path) = key.strip_prefix(PARAMETER) else {
            // Burn's records name the number of dimensions of a parameter's state, such as `Rank2`:
            // here the shard's.
            let is_rank = key
                .strip_prefix("Rank")
                .is_some_and(|rank| rank.parse::<usize>().is_ok());
            let key = match of.filter(|_| is_rank) {
                Some(of) => format!("Rank{}", layout.shard_shape(of).len()),
                None => key.to_owned(),
            };
            return Ok(Some((key, of)));
        };
        // Burn too ignores the state of a parameter that is not trained now.
        Ok(held(path).map(|parameter| (ids[&Some(&parameter)].clone(), Some(parameter))))
    };
    let put = |place: &[String], parameter: usize, fields: Fields| -> Result<_, E> {
        let dtype: DType = fields[0].1.deserialized().map_err(refuse)?;
        let mut tensor = at_place(place, parameter, dtype, layout)?;
        if layout.holds_all() {
            tensor.ranges = core::iter::once(0..layout.held(parameter)).collect();
        }
        let Some(bytes) = load(&tensor)? else {
            return Ok(None);
        };
        let wanted = layout.held(parameter) * tensor.spec.element_bytes();
        if bytes.len() != wanted {
            let (name, has) = (tensor.spec.name, bytes.len());
            return Err(refuse(format!("{name} has {has} bytes, but {wanted} are needed")).into());
        }
        let shape = Value::serialized(&layout.shard_shape(parameter)).map_err(refuse)?;
        let dtype = Value::serialized(&on_host(dtype)).map_err(refuse)?;
        let values = [Value::Bytes(bytes), shape, dtype];
        let keys = NAMES.map(|key| Value::Text(key.to_owned()));
        Ok(Some(Value::Map(keys.into_iter().zip(values).collect())))
    };
    let tree = Value::serialized(tree).map_err(refuse)?;
    let found = Walk {
        rename,
        replace: put,
        place: Vec::new(),
    }
    .value(tree, None)?;
    Ok(found.unwrap_or(Value::Null))
}

/// The record of a tree that [`join`] has made. Costs a copy of the tensors in host memory. A tree
/// that is not borrowed is freed before the record is made.
///
/// # Errors
///
/// [`ShardingFault::State`].
pub(crate) fn to_record<B: Backend, R: Record<B>>(
    tree: impl Borrow<Value>,
    device: &B::Device,
) -> Result<R, ShardingFault> {
    let item: Item<R, B> = tree.borrow().deserialized().map_err(refuse)?;
    drop(tree);
    Ok(R::from_item(item, device))
}

/// The float type in which Burn loads the tensors of a record. It saves them in f32.
pub(crate) fn loaded_dtype<B: Backend>(device: &B::Device) -> DType {
    let element = TensorData::from([0.0_f32]).convert::<B::FloatElem>();
    Tensor::<B, 1>::from_data(element, device).dtype()
}

/// Checks that state which was split comes back in its type, where a record's tensors are loaded as
/// `loaded`. State is taken to be of the type of its parameter, unless it has a master: that of
/// [`OffloadedAdamW`](crate::OffloadedAdamW) is f32, and its record keeps it on the host.
///
/// # Errors
///
/// [`ShardingFault::StateDtype`].
pub(crate) fn check_types(
    tensors: &Tensors,
    layout: &Layout,
    loaded: DType,
) -> Result<(), ShardingFault> {
    let tensors = || tensors.iter().map(|(tensor, _)| tensor);
    let with_master: HashSet<_> = tensors()
        .filter(|tensor| is_master(&tensor.spec.name))
        .map(|tensor| tensor.parameter)
        .collect();
    for tensor in tensors() {
        let ParameterSpec { path, dtype, .. } = &layout.parameters()[tensor.parameter];
        let is_float = matches!(
            tensor.spec.dtype,
            Dtype::F64 | Dtype::F32 | Dtype::F16 | Dtype::BF16
        );
        let kept = match dtype {
            DType::F64 => DType::F32,
            _ => loaded,
        };
        // The averages are f32, or f64 of such parameters, and are loaded so.
        let is_average = tensor.spec.name.starts_with(AVERAGE_IN_FILES);
        if is_float && !is_average && *dtype != kept && !with_master.contains(&tensor.parameter) {
            let (path, dtype) = (path.clone(), *dtype);
            return Err(ShardingFault::StateDtype { path, dtype, kept });
        }
    }
    Ok(())
}

/// Whether a tensor of this name is a parameter's f32 master.
fn is_master(name: &str) -> bool {
    name.ends_with(".master")
}

/// The entries of a map in a tree.
type Fields = Vec<(Value, Value)>;

/// Walks a tree with two functions: `rename` gets every key of a map and its place, `replace` every
/// tensor. A key or a tensor for which they return `None` is left out, with all state of its
/// parameter.
struct Walk<K, T> {
    rename: K,
    replace: T,
    /// The keys from the root, with the path of a parameter for its id.
    place: Vec<String>,
}

impl<K, T> Walk<K, T> {
    fn value<E>(&mut self, value: Value, of: Option<usize>) -> Result<Option<Value>, E>
    where
        E: From<ShardingFault>,
        K: FnMut(&[String], &str, Option<usize>) -> Result<Option<(String, Option<usize>)>, E>,
        T: FnMut(&[String], usize, Fields) -> Result<Option<Value>, E>,
    {
        let refused = |place: &[String], what: &str| refuse(format!("{} {what}", name_at(place)));
        match value {
            Value::Array(values) => {
                let mut found = Vec::new();
                for (index, value) in values.into_iter().enumerate() {
                    self.place.push(index.to_string());
                    found.push(self.value(value, of)?.unwrap_or(Value::Null));
                    self.place.pop();
                }
                Ok(Some(Value::Array(found)))
            }
            Value::Map(fields) if is_tensor(&fields) => match of {
                Some(of) => (self.replace)(&self.place, of, fields),
                None => Err(refused(&self.place, NO_SHARD).into()),
            },
            Value::Map(fields) => {
                let (mut found, mut is_left_out) = (Fields::new(), false);
                for (key, value) in fields {
                    let Value::Text(old) = key else {
                        return Err(refused(&self.place, "has a key that is no text").into());
                    };
                    let Some((new, of_child)) = (self.rename)(&self.place, &old, of)? else {
                        continue;
                    };
                    let path = new.strip_prefix(PARAMETER).or(old.strip_prefix(PARAMETER));
                    self.place.push(path.unwrap_or(&old).to_owned());
                    let value = self.value(value, of_child)?;
                    self.place.pop();
                    match value {
                        Some(value) => found.push((Value::Text(new), value)),
                        // The walk continues, so that its calls are the same on all ranks.
                        None => is_left_out |= of.is_some(),
                    }
                }
                Ok((!is_left_out).then_some(Value::Map(found)))
            }
            // JSON has neither bytes nor numbers that are not finite.
            Value::Float(number) if !number.is_finite() => {
                Err(refused(&self.place, &format!("is {number}")).into())
            }
            Value::Bytes(_) | Value::Tag(..) => {
                Err(refused(&self.place, "is neither a tensor nor JSON").into())
            }
            leaf => Ok(Some(leaf)),
        }
    }
}

/// The JSON of a value whose numbers are finite: others JSON would have as null.
///
/// # Errors
///
/// What is wrong.
pub(crate) fn json(value: &impl Serialize) -> Result<Json, String> {
    fn not_finite(value: &Value, key: &str) -> Option<String> {
        match value {
            Value::Float(number) if !number.is_finite() => {
                Some(format!("{key} is {number}, which JSON cannot hold"))
            }
            Value::Array(values) => values.iter().find_map(|value| not_finite(value, key)),
            Value::Map(fields) => fields
                .iter()
                .find_map(|(name, value)| not_finite(value, name.as_text().unwrap_or(key))),
            _ => None,
        }
    }
    let tree = Value::serialized(value).map_err(|error| error.to_string())?;
    match not_finite(&tree, "a number") {
        Some(reason) => Err(reason),
        None => serde_json::to_value(tree).map_err(|error| error.to_string()),
    }
}

/// The positions of the parameters, by path.
fn positions(layout: &Layout) -> HashMap<&str, usize> {
    let parameters = layout.parameters().iter().zip(0..);
    parameters.map(|(it, index)| (&*it.path, index)).collect()
}

/// Where an update's record has the averages of the weights.
const AVERAGES: [&str; 3] = ["parts", "average", "values"];

/// The beginning of their names in files.
const AVERAGE_IN_FILES: &str = "optimizer/average/";

/// What is before the path of a parameter there.
const WEIGHT: &str = "weight ";

/// The path of the parameter of which a key at this place has the average.
fn averaged<'a>(place: &[String], key: &'a str) -> Option<&'a str> {
    (place == AVERAGES).then(|| key.strip_prefix(WEIGHT))?
}

/// Why a tensor of a layer around the optimizer is refused.
const NO_SHARD: &str = "is a tensor of no shard: a sum of an incomplete window of micro-batches is each rank's own, so save after an \
                        update; a tensor of a part of one's own is kept by records of a Learner (`reduce_in_learner`), not by the `Recorder`";

/// Whether these are the fields of a tensor, in Burn's tree or in JSON.
fn is_tensor(fields: &Fields) -> bool {
    let mut keys = fields.iter().map(|(key, _)| key);
    keys.any(|key| key.as_text() == Some(TENSOR)) || are_a_tensor(fields)
}

/// The name of what is at a place of the tree: its keys, joined by dots. Where an update keeps an
/// optimizer's record, its own keys are left out, except the name of a group of parameters.
fn name_at(place: &[String]) -> String {
    if let [before @ .., key, _] = place
        && let Some(path) = averaged(before, key)
    {
        return format!("average/{path}");
    }
    // `parts.optimizer.values.record.Tree`, or a group's name in place of `record`.
    let is_tree =
        |keys: &[String]| (&*keys[0], &*keys[2], &*keys[4]) == ("parts", "values", "Tree");
    let Some(before) = place.windows(5).position(is_tree) else {
        return place.join(".");
    };
    let (outside, of_update) = place.split_at(before);
    // Every other key says what the value is that comes then.
    let inside = of_update[5..].iter().skip(1).step_by(2).cloned();
    let own_name = inside.collect::<Vec<_>>().join(".");
    let named = match &*of_update[3] {
        "record" => own_name,
        group => format!("{group}/{own_name}"),
    };
    [outside, &[named]].concat().join(".")
}

/// The tensor at a place of the tree, with this rank's shard.
fn at_place(
    place: &[String],
    parameter: usize,
    dtype: DType,
    layout: &Layout,
) -> Result<StateTensor, ShardingFault> {
    let name = format!("optimizer/{}", name_at(place));
    let shape = layout.parameters()[parameter].shape.clone();
    Ok(StateTensor {
        spec: TensorSpec::new(&*name, in_file(&name, dtype)?, shape),
        former_name: format!("optimizer/{}", place.join(".")),
        parameter,
        ranges: layout.shard(parameter).to_vec(),
    })
}

/// The bytes of the elements in `ranges` of a tensor, one range behind the other.
pub(crate) fn cut(bytes: Vec<u8>, ranges: &[Range<usize>], tensor: &TensorSpec) -> Vec<u8> {
    if Some(ranges.iter().map(Range::len).sum()) == tensor.elements() {
        return bytes;
    }
    let size = tensor.element_bytes();
    let parts = ranges
        .iter()
        .map(|range| &bytes[range.start * size..range.end * size]);
    parts.collect::<Vec<_>>().concat()
}

/// The type in files; bools are stored as one byte each, whatever their type on the device.
///
/// # Errors
///
/// [`ShardingFault::State`] for quantized tensors and others that safetensors has no type for.
pub(crate) fn in_file(name: &str, dtype: DType) -> Result<Dtype, ShardingFault> {
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

pub(crate) fn refuse(reason: impl ToString) -> ShardingFault {
    ShardingFault::State {
        reason: reason.to_string(),
    }
}
