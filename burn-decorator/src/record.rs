//! Saved state of an optimizer decorator: its own beside that of the optimizer it wraps. It can
//! also be read from what that optimizer saved alone.

use core::fmt;
use core::marker::PhantomData;

use serde::de::value::{MapAccessDeserializer, StringDeserializer};
use serde::de::{
    DeserializeOwned, DeserializeSeed, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
};
use serde::ser::SerializeStruct;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// The state that a decorator saves beside that of the optimizer it wraps.
pub trait OwnState: Clone + Serialize + DeserializeOwned {
    /// The field that holds it: a name that no optimizer's record has, for it tells the two kinds
    /// of files apart.
    const FIELD: &'static str;
}

/// The field of the wrapped optimizer's record.
const INNER: &str = "optimizer";

/// The serialized record of an optimizer decorator, for `Record::Item`.
///
/// A file that the wrapped optimizer saved by itself is read as one without `own`, if its format
/// names fields (Burn's `NamedMpk` and JSON recorders). `#[serde(untagged)]` would not do: formats
/// that do not name fields, such as bincode, cannot read it. Files in those formats must be records
/// of this type.
#[derive(Clone, Debug)]
pub struct WrappedItem<S, I> {
    /// The decorator's state; `None` if it has none, or if the file is one of the optimizer alone.
    pub own: Option<S>,
    /// The wrapped optimizer's record.
    pub inner: I,
}

impl<S: OwnState, I: Serialize> Serialize for WrappedItem<S, I> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        // The decorator's own field comes first: the reader distinguishes the files by the first
        // field.
        let mut fields = serializer.serialize_struct("WrappedItem", 2)?;
        fields.serialize_field(S::FIELD, &self.own)?;
        fields.serialize_field(INNER, &self.inner)?;
        fields.end()
    }
}

impl<'de, S: OwnState, I: Deserialize<'de>> Deserialize<'de> for WrappedItem<S, I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Bincode uses only the number of these fields.
        deserializer.deserialize_struct("WrappedItem", &["own", INNER], ItemVisitor(PhantomData))
    }
}

struct ItemVisitor<S, I>(PhantomData<(S, I)>);

impl<'de, S: OwnState, I: Deserialize<'de>> Visitor<'de> for ItemVisitor<S, I> {
    type Value = WrappedItem<S, I>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "a record with `{}` and `{INNER}`, or that of the optimizer alone",
            S::FIELD
        )
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let missing = |index| A::Error::invalid_length(index, &"two fields");
        let own = seq.next_element()?.ok_or_else(|| missing(0))?;
        let inner = seq.next_element()?.ok_or_else(|| missing(1))?;
        Ok(WrappedItem { own, inner })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let first: Option<String> = map.next_key()?;
        if first.as_deref() != Some(S::FIELD) {
            let inner = I::deserialize(MapAccessDeserializer::new(Replay::new(first, map)))?;
            return Ok(WrappedItem { own: None, inner });
        }
        let own = map.next_value()?;
        match map.next_key::<String>()?.as_deref() {
            Some(INNER) => Ok(WrappedItem {
                own,
                inner: map.next_value()?,
            }),
            Some(other) => Err(A::Error::unknown_field(other, &[INNER])),
            None => Err(A::Error::missing_field(INNER)),
        }
    }
}

/// A map whose first key was taken out to look at it.
struct Replay<A> {
    first: Option<String>,
    is_empty: bool,
    rest: A,
}

impl<A> Replay<A> {
    fn new(first: Option<String>, rest: A) -> Self {
        Self {
            is_empty: first.is_none(),
            first,
            rest,
        }
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Replay<A> {
    type Error = A::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(
        &mut self,
        seed: K,
    ) -> Result<Option<K::Value>, A::Error> {
        if let Some(first) = self.first.take() {
            let first: StringDeserializer<A::Error> = first.into_deserializer();
            return seed.deserialize(first).map(Some);
        }
        if self.is_empty {
            return Ok(None);
        }
        self.rest.next_key_seed(seed)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, A::Error> {
        self.rest.next_value_seed(seed)
    }

    fn size_hint(&self) -> Option<usize> {
        let taken = usize::from(self.first.is_some());
        self.rest.size_hint().map(|rest| rest + taken)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
    struct Steps(u32);

    impl OwnState for Steps {
        const FIELD: &'static str = "steps";
    }

    type Inner = BTreeMap<String, f32>;

    fn read(json: &str) -> Result<WrappedItem<Steps, Inner>, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn its_own_come_back() {
        let inner = Inner::from([("a".to_owned(), 1.5)]);
        for own in [Some(Steps(3)), None] {
            let inner = inner.clone();
            let written = serde_json::to_string(&WrappedItem {
                own: own.clone(),
                inner,
            });
            let found = read(&written.unwrap()).unwrap();
            assert_eq!((found.own, found.inner["a"]), (own, 1.5));
        }
    }

    #[test]
    fn the_inner_alone_is_read() {
        let found = read(r#"{"a": 1.5, "b": 2.5}"#).unwrap();
        assert_eq!((found.own, found.inner.len()), (None, 2));
        assert!(read("{}").unwrap().inner.is_empty());
    }

    #[test]
    fn what_is_neither_is_refused() {
        assert!(
            read(r#"{"steps": 3}"#)
                .unwrap_err()
                .contains("missing field `optimizer`")
        );
        assert!(
            read(r#"{"steps": 3, "other": {}}"#)
                .unwrap_err()
                .contains("unknown field `other`")
        );
        assert!(
            read("7")
                .unwrap_err()
                .contains("a record with `steps` and `optimizer`")
        );
    }
}
