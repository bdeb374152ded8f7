//! The saved state of an update: that of each part under its name.

use core::fmt;
use std::collections::BTreeMap;

use burn::record::{PrecisionSettings, Record};
use burn::tensor::{DType, TensorData, backend::Backend};
use serde::de::{Error, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};

use crate::UpdateError;
use crate::tree::{RecordTree, SavedRecord};

/// The record of an [`Update`](crate::Update): training resumed from it, also in the middle of a
/// window, continues as if it had not stopped.
///
/// Each part that has a state is there under its name: `scale`, `accumulate`, `average`,
/// `optimizer`, and the names of parts of one's own. Tensors keep their type, also in recorders of
/// half precision. The configuration is not in it.
///
/// A file that an optimizer alone has written is no such record, and its error says so. It is
/// loaded into that optimizer, which then becomes the update's with its state:
/// `Update::new(AdamWConfig::new().init().load_record(record))`.
#[derive(Clone, Debug)]
pub struct UpdateRecord<B: Backend> {
    parts: BTreeMap<String, PartState>,
    device: B::Device,
    added: Vec<String>,
}

/// The serialized form of an [`UpdateRecord`].
#[derive(Clone, Debug, Serialize)]
pub struct UpdateItem {
    parts: BTreeMap<String, PartState>,
}

/// The field of an [`UpdateItem`].
const PARTS: &str = "parts";

/// What is said of a file with other fields.
const OTHER_RECORD: &str = "the file is no record of an `Update`, but of an optimizer alone, or of one in wrappers \
     (`MultiSteps`, `GradScaler::wrap`, `ZeroOptimizer`), which are parts of an update now: load that of an optimizer alone into \
     it, and make the update of it, `Update::new(optimizer.load_record(record))`; finish a training in wrappers with the version that \
     began it, or start the state of its optimizer anew, with the trained model";

impl<'de> Deserialize<'de> for UpdateItem {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_struct("UpdateItem", &[PARTS], ItemVisitor)
    }
}

/// Reads an [`UpdateItem`], and tells the record of an optimizer from it.
struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = UpdateItem;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the record of an `Update`")
    }

    /// Of formats that do not name fields, such as bincode: another record is not always told.
    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<UpdateItem, A::Error> {
        let parts = fields.next_element();
        let parts = parts.map_err(|error| A::Error::custom(format!("{error}: {OTHER_RECORD}")))?;
        let parts = parts.ok_or_else(|| A::Error::custom(OTHER_RECORD))?;
        Ok(UpdateItem { parts })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<UpdateItem, A::Error> {
        match fields.next_key::<String>()?.as_deref() {
            Some(PARTS) => {
                let parts = fields.next_value()?;
                Ok(UpdateItem { parts })
            }
            // None: an optimizer that has made no step.
            Some(_) | None => Err(A::Error::custom(OTHER_RECORD)),
        }
    }
}

/// The state of one part: values by name.
///
/// ```
/// use burn_update::PartState;
///
/// let mut state = PartState::default();
/// state.put_integer("updates", 7);
/// assert_eq!(state.take_integer("updates")?, 7);
/// assert!(state.take_integer("updates").is_err(), "it was taken");
/// # Ok::<(), burn_update::UpdateError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PartState {
    /// The part's name, for errors.
    #[serde(skip)]
    part: String,
    values: BTreeMap<String, StateValue>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
enum StateValue {
    Integer(u64),
    Number(f64),
    Tensor(TensorData),
    Tree(RecordTree),
}

impl PartState {
    /// Adds a whole number.
    pub fn put_integer(&mut self, name: impl Into<String>, value: u64) {
        self.values.insert(name.into(), StateValue::Integer(value));
    }

    /// Adds a number.
    pub fn put_number(&mut self, name: impl Into<String>, value: f64) {
        self.values.insert(name.into(), StateValue::Number(value));
    }

    /// Adds a tensor, in its type.
    pub fn put_tensor(&mut self, name: impl Into<String>, value: TensorData) {
        self.values.insert(name.into(), StateValue::Tensor(value));
    }

    /// Adds what another recorder has written.
    pub fn put_bytes(&mut self, name: impl Into<String>, value: Vec<u8>) {
        let length = value.len();
        // As a tensor, which every format writes as bytes and not as a list of numbers.
        self.put_tensor(name, TensorData::from_bytes_vec(value, [length], DType::U8));
    }

    /// Adds the record of one of Burn's modules or optimizers.
    pub(crate) fn put_tree(&mut self, name: impl Into<String>, value: RecordTree) {
        self.values.insert(name.into(), StateValue::Tree(value));
    }

    /// Takes the record of one of Burn's modules or optimizers out.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`].
    pub(crate) fn take_record(&mut self, name: &str) -> Result<SavedRecord, UpdateError> {
        match self.values.remove(name) {
            Some(StateValue::Tree(value)) => Ok(SavedRecord::Tree(value)),
            Some(StateValue::Tensor(bytes)) if bytes.dtype == DType::U8 => {
                Ok(SavedRecord::Bytes(bytes.into_bytes().to_vec()))
            }
            _ => Err(self.missing(name)),
        }
    }

    /// Adds a value of another state.
    pub(crate) fn put_state(&mut self, name: &str, other: &mut Self, value: &str) {
        if let Some(value) = other.values.remove(value) {
            self.values.insert(name.to_owned(), value);
        }
    }

    /// Takes a whole number out.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`].
    pub fn take_integer(&mut self, name: &str) -> Result<u64, UpdateError> {
        match self.values.remove(name) {
            Some(StateValue::Integer(value)) => Ok(value),
            _ => Err(self.missing(name)),
        }
    }

    /// Takes a number out.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`].
    pub fn take_number(&mut self, name: &str) -> Result<f64, UpdateError> {
        match self.values.remove(name) {
            Some(StateValue::Number(value)) => Ok(value),
            _ => Err(self.missing(name)),
        }
    }

    /// Takes a tensor out.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`].
    pub fn take_tensor(&mut self, name: &str) -> Result<TensorData, UpdateError> {
        match self.values.remove(name) {
            Some(StateValue::Tensor(value)) => Ok(value),
            _ => Err(self.missing(name)),
        }
    }

    /// Takes what another recorder has written out.
    ///
    /// # Errors
    ///
    /// [`UpdateError::ValueMissing`].
    pub fn take_bytes(&mut self, name: &str) -> Result<Vec<u8>, UpdateError> {
        Ok(self.take_tensor(name)?.into_bytes().to_vec())
    }

    /// Takes all tensors out whose names begin with `prefix`, with the rest of their names.
    pub fn take_tensors(&mut self, prefix: &str) -> Vec<(String, TensorData)> {
        let is_one = |name: &String, value: &StateValue| {
            name.starts_with(prefix) && matches!(value, StateValue::Tensor(_))
        };
        let values = core::mem::take(&mut self.values).into_iter();
        let (found, others) =
            values.partition::<BTreeMap<_, _>, _>(|(name, value)| is_one(name, value));
        self.values = others;
        let tensors = found.into_iter().filter_map(|(name, value)| match value {
            StateValue::Tensor(data) => Some((name[prefix.len()..].to_owned(), data)),
            StateValue::Integer(_) | StateValue::Number(_) | StateValue::Tree(_) => None,
        });
        tensors.collect()
    }

    /// The names of the values that have not been taken.
    pub(crate) fn left(&self) -> impl Iterator<Item = &String> {
        self.values.keys()
    }

    /// The state of one of several that a part consists of.
    pub(crate) fn take_state(&mut self, name: &str, value: &str) -> Result<Self, UpdateError> {
        let mut inner = Self {
            part: self.part.clone(),
            ..Self::default()
        };
        match self.values.remove(name) {
            Some(found) => inner.values.insert(value.to_owned(), found),
            None => return Err(self.missing(name)),
        };
        Ok(inner)
    }

    /// The name of the part that it is of.
    pub(crate) fn part(&self) -> &str {
        &self.part
    }

    fn missing(&self, value: &str) -> UpdateError {
        UpdateError::ValueMissing {
            part: self.part.clone(),
            value: value.to_owned(),
        }
    }
}

impl<B: Backend> UpdateRecord<B> {
    /// One of these parts.
    pub(crate) fn new(parts: BTreeMap<String, PartState>) -> Self {
        Self {
            parts,
            device: B::Device::default(),
            added: Vec::new(),
        }
    }

    /// The names of the parts that have a state in it.
    pub fn parts(&self) -> Vec<String> {
        self.parts.keys().cloned().collect()
    }

    /// Leaves the state of a part out, for an update that does not have the part.
    #[must_use]
    pub fn without(mut self, part: &str) -> Self {
        self.parts.remove(part);
        self
    }

    /// Lets an update have a part that the record does not have: it starts anew.
    #[must_use]
    pub fn with_new(mut self, part: &str) -> Self {
        self.added.push(part.to_owned());
        self
    }

    /// Whether it has the state of a part.
    pub(crate) fn has(&self, part: &str) -> bool {
        self.parts.contains_key(part)
    }

    /// Where the tensors are loaded to.
    pub(crate) fn device(&self) -> &B::Device {
        &self.device
    }

    /// Takes the state of a part out; `None` if the part is to start anew.
    ///
    /// # Errors
    ///
    /// [`UpdateError::RecordLacks`].
    pub(crate) fn take(&mut self, part: &str) -> Result<Option<PartState>, UpdateError> {
        match self.parts.remove(part) {
            Some(state) => Ok(Some(PartState {
                part: part.to_owned(),
                ..state
            })),
            None if self.added.iter().any(|added| added == part) => Ok(None),
            None => Err(UpdateError::RecordLacks {
                part: part.to_owned(),
                has: self.parts(),
            }),
        }
    }

    /// # Errors
    ///
    /// [`UpdateError::RecordHas`], if a part has not been taken.
    pub(crate) fn finish(self) -> Result<(), UpdateError> {
        match self.parts.into_keys().next() {
            Some(part) => Err(UpdateError::RecordHas { part }),
            None => Ok(()),
        }
    }
}

impl<B: Backend> Record<B> for UpdateRecord<B> {
    type Item<S: PrecisionSettings> = UpdateItem;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        UpdateItem { parts: self.parts }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            parts: item.parts,
            device: device.clone(),
            added: Vec::new(),
        }
    }
}
