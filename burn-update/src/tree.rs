//! The record of one of Burn's optimizers as a tree whose keys are the ids of parameters, so that
//! its tensors can be cut over ranks.

use std::collections::BTreeMap;

use burn::record::{
    DoublePrecisionSettings, FullPrecisionSettings, NamedMpkBytesRecorder, Record, Recorder,
};
use burn::tensor::backend::Backend;
use burn::tensor::{DType, Element, TensorData};
use ciborium::Value;
use serde::{Deserialize, Serialize};

use crate::tensor_fields::{are_a_tensor, into_tensor};

/// What Burn's records serialize to. Every format can hold it, also those that do not describe
/// themselves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RecordTree {
    /// Nothing.
    Null,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Integer(i64),
    /// Another number.
    Number(f64),
    /// A text.
    Text(String),
    /// Several values.
    List(Vec<RecordTree>),
    /// Values by name.
    Map(BTreeMap<String, RecordTree>),
    /// A tensor.
    Tensor(TensorData),
}

impl RecordTree {
    /// The tree of a record. Tensors are f32, or f64 if those of the backend are.
    ///
    /// # Errors
    ///
    /// What cannot be kept.
    pub(crate) fn of<B: Backend, R: Record<B>>(record: R) -> Result<Self, String> {
        let value = if is_double::<B>() {
            Value::serialized(&record.into_item::<DoublePrecisionSettings>())
        } else {
            Value::serialized(&record.into_item::<FullPrecisionSettings>())
        };
        Self::of_value(value.map_err(|error| error.to_string())?)
    }

    /// The record of the tree.
    ///
    /// # Errors
    ///
    /// Why it is not one of this kind.
    pub(crate) fn into_record<B, R>(self, device: &B::Device) -> Result<R, String>
    where
        B: Backend,
        R: Record<B>,
    {
        let value = self.into_value()?;
        if is_double::<B>() {
            let item = value.deserialized().map_err(|error| error.to_string())?;
            Ok(R::from_item::<DoublePrecisionSettings>(item, device))
        } else {
            let item = value.deserialized().map_err(|error| error.to_string())?;
            Ok(R::from_item::<FullPrecisionSettings>(item, device))
        }
    }

    fn of_value(value: Value) -> Result<Self, String> {
        match value {
            Value::Null => Ok(Self::Null),
            Value::Bool(value) => Ok(Self::Bool(value)),
            Value::Float(value) => Ok(Self::Number(value)),
            Value::Text(value) => Ok(Self::Text(value)),
            Value::Integer(value) => {
                let value = i64::try_from(value);
                value.map(Self::Integer).map_err(|error| error.to_string())
            }
            Value::Array(values) => {
                let values = values.into_iter().map(Self::of_value);
                Ok(Self::List(values.collect::<Result<_, _>>()?))
            }
            Value::Map(fields) if are_a_tensor(&fields) => into_tensor(fields).map(Self::Tensor),
            Value::Map(fields) => {
                let fields = fields.into_iter().map(|(key, value)| match key {
                    Value::Text(key) => Ok((key, Self::of_value(value)?)),
                    key => Err(format!("the key {key:?} is no text")),
                });
                Ok(Self::Map(fields.collect::<Result<_, String>>()?))
            }
            value => Err(format!("{value:?} is no value of a record")),
        }
    }

    fn into_value(self) -> Result<Value, String> {
        Ok(match self {
            Self::Null => Value::Null,
            Self::Bool(value) => Value::Bool(value),
            Self::Integer(value) => Value::from(value),
            Self::Number(value) => Value::Float(value),
            Self::Text(value) => Value::Text(value),
            Self::List(values) => {
                let values = values.into_iter().map(Self::into_value);
                Value::Array(values.collect::<Result<_, _>>()?)
            }
            Self::Map(fields) => {
                let fields = fields
                    .into_iter()
                    .map(|(key, value)| Ok((Value::Text(key), value.into_value()?)));
                Value::Map(fields.collect::<Result<_, String>>()?)
            }
            Self::Tensor(data) => Value::serialized(&data).map_err(|error| error.to_string())?,
        })
    }
}

/// The record of one of Burn's optimizers, as a saved update has it.
pub(crate) enum SavedRecord {
    Tree(RecordTree),
    /// In the format of Burn's `NamedMpkBytesRecorder`: one that no tree holds, or that an update
    /// saved before it could be cut over ranks.
    Bytes(Vec<u8>),
}

impl SavedRecord {
    /// The record.
    ///
    /// # Errors
    ///
    /// Why it is not one of this kind.
    pub(crate) fn into_record<B, R>(self, device: &B::Device) -> Result<R, String>
    where
        B: Backend,
        R: Record<B>,
    {
        let bytes = match self {
            Self::Tree(tree) => return tree.into_record::<B, R>(device),
            Self::Bytes(bytes) => bytes,
        };
        let record = if is_double::<B>() {
            let recorder = NamedMpkBytesRecorder::<DoublePrecisionSettings>::default();
            Recorder::<B>::load(&recorder, bytes, device)
        } else {
            let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
            Recorder::<B>::load(&recorder, bytes, device)
        };
        record.map_err(|error| error.to_string())
    }
}

/// A record in the format of Burn's `NamedMpkBytesRecorder`.
pub(crate) fn record_bytes<B: Backend, R: Record<B>>(record: R) -> Vec<u8> {
    let bytes = if is_double::<B>() {
        let recorder = NamedMpkBytesRecorder::<DoublePrecisionSettings>::default();
        Recorder::<B>::record(&recorder, record, ())
    } else {
        let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
        Recorder::<B>::record(&recorder, record, ())
    };
    bytes.expect("an optimizer's record is written to memory")
}

/// Whether tensors have 64 bits.
fn is_double<B: Backend>() -> bool {
    B::FloatElem::dtype() == DType::F64
}
