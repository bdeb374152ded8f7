//! A tensor among the values of a serialized record: the fields of a [`TensorData`]. For this crate
//! and burn-zero, which cuts the tensors of records over ranks.

use burn::tensor::TensorData;
use ciborium::Value;

/// The names of the fields.
pub const NAMES: [&str; 3] = ["bytes", "shape", "dtype"];

/// Whether a map has these fields, and no others.
pub fn are_a_tensor(fields: &[(Value, Value)]) -> bool {
    let has = |name| fields.iter().any(|(key, _)| key.as_text() == Some(name));
    fields.len() == NAMES.len() && NAMES.into_iter().all(has)
}

/// The tensor of these fields, without a copy of its elements.
///
/// # Errors
///
/// What is wrong with a field.
pub fn into_tensor(mut fields: Vec<(Value, Value)>) -> Result<TensorData, String> {
    let mut take = |name| {
        let mut fields = fields.iter_mut();
        let found = fields.find(|(key, _)| key.as_text() == Some(name));
        found.map_or(Value::Null, |(_, value)| {
            core::mem::replace(value, Value::Null)
        })
    };
    let [bytes, shape, dtype] = NAMES.map(&mut take);
    let bytes = bytes
        .into_bytes()
        .map_err(|_| "a tensor has no bytes".to_owned())?;
    let shape: Vec<usize> = shape.deserialized().map_err(|error| error.to_string())?;
    let dtype = dtype.deserialized().map_err(|error| error.to_string())?;
    Ok(TensorData::from_bytes_vec(bytes, shape, dtype))
}
