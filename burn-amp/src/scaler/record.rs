//! Checkpoints of a wrapped optimizer: the scaler's state beside the optimizer's record. The record of the optimizer
//! alone is read too.

use core::{fmt, marker::PhantomData};

use burn::{
    record::{PrecisionSettings, Record},
    tensor::backend::Backend,
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        DeserializeSeed, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, StringDeserializer},
    },
};

use super::state::Counters;
use crate::LossScaleState;

/// The record of a [`ScaledOptimizer`](crate::ScaledOptimizer): training resumed from it continues as if it had not
/// stopped.
///
/// Files that the wrapped optimizer's own record was written to can be loaded as well, if their format names fields
/// (Burn's `NamedMpk` and JSON recorders, compressed or not); the scale then starts from its initial value. The other way
/// round is not possible.
#[derive(Clone, Debug)]
pub struct ScaledRecord<R> {
    /// The scaler's state; `None` if it is disabled, or if the file is one of the optimizer alone.
    pub scaler: Option<ScalerState>,
    /// The optimizer's own record.
    pub inner: R,
}

/// The part of a [`GradScaler`](crate::GradScaler) that a checkpoint keeps. The configuration is not in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScalerState {
    pub(super) loss_scale: LossScaleState,
    pub(super) counters: Counters,
}

/// The serialized form of [`ScaledRecord`].
#[derive(Clone, Debug, Serialize)]
pub struct ScaledItem<I> {
    // First in every file, and under a name that no optimizer's record has: that is what tells the two kinds apart.
    #[serde(rename = "loss_scaler")]
    scaler: Option<ScalerState>,
    #[serde(rename = "optimizer")]
    inner: I,
}

const SCALER: &str = "loss_scaler";
const INNER: &str = "optimizer";

impl<B: Backend, R: Record<B>> Record<B> for ScaledRecord<R> {
    type Item<S: PrecisionSettings> = ScaledItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        ScaledItem {
            scaler: self.scaler,
            inner: self.inner.into_item(),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            scaler: item.scaler,
            inner: R::from_item(item.inner, device),
        }
    }
}

impl<'de, I: Deserialize<'de>> Deserialize<'de> for ScaledItem<I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not `#[serde(untagged)]`: formats that do not name fields, such as bincode, cannot read that.
        deserializer.deserialize_struct("ScaledItem", &[SCALER, INNER], ItemVisitor(PhantomData))
    }
}

struct ItemVisitor<I>(PhantomData<I>);

impl<'de, I: Deserialize<'de>> Visitor<'de> for ItemVisitor<I> {
    type Value = ScaledItem<I>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the record of a scaled optimizer, or of the optimizer alone")
    }

    /// Formats that do not name fields hold nothing but our own record.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let missing = |index| A::Error::invalid_length(index, &"two fields");
        let scaler = seq.next_element()?.ok_or_else(|| missing(0))?;
        let inner = seq.next_element()?.ok_or_else(|| missing(1))?;
        Ok(ScaledItem { scaler, inner })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let first: Option<String> = map.next_key()?;
        if first.as_deref() != Some(SCALER) {
            let inner = I::deserialize(MapAccessDeserializer::new(Replay::new(first, map)))?;
            return Ok(ScaledItem {
                scaler: None,
                inner,
            });
        }
        let scaler = map.next_value()?;
        match map.next_key::<String>()?.as_deref() {
            Some(INNER) => Ok(ScaledItem {
                scaler,
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
