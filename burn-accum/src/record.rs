//! The saved state: the partial window beside the wrapped optimizer's record. The record of that optimizer alone is read
//! too.

use core::{fmt, marker::PhantomData};
use std::collections::BTreeMap;

use burn::{
    module::ParamId,
    record::{PrecisionSettings, Record},
    tensor::{
        TensorData, TensorPrimitive,
        backend::{AutodiffBackend, Backend},
        read_sync,
    },
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{
        DeserializeSeed, Error, IntoDeserializer, MapAccess, SeqAccess, Visitor,
        value::{MapAccessDeserializer, StringDeserializer},
    },
};

use crate::{sums::Sums, tally::Tally};

/// The record of a [`MultiSteps`](crate::MultiSteps): training resumed from it, at any micro-step of a window,
/// continues as if it had not stopped. The accumulators are stored as they are, f32, also by recorders of half
/// precision.
///
/// The configuration is not in it. Under another window length the partial window is kept: it ends when the new length
/// is reached, or at the next micro-step if it is already exceeded.
///
/// Files that the wrapped optimizer's own record was written to can be loaded as well, if their format names fields
/// (Burn's `NamedMpk` and JSON recorders, compressed or not); the window is then empty. The other way round is not
/// possible.
#[derive(Clone)]
pub struct AccumRecord<R, I: Backend> {
    /// The partial window; `None` if the file is one of the wrapped optimizer alone.
    pub window: Option<PartialWindow<I>>,
    /// The wrapped optimizer's own record.
    pub inner: R,
}

/// The sums and counters of a window that is not complete.
#[derive(Clone)]
pub struct PartialWindow<I: Backend> {
    pub(crate) tally: Tally,
    pub(crate) sums: Sums<I>,
}

impl<I: Backend> PartialWindow<I> {
    /// Updates before this window.
    pub fn updates(&self) -> u64 {
        self.tally.updates
    }

    /// Micro-steps in it.
    pub fn micro_steps(&self) -> u64 {
        self.tally.window.micro_steps
    }
}

impl<I: Backend> Default for PartialWindow<I> {
    fn default() -> Self {
        Self {
            tally: Tally::default(),
            sums: Sums::<I>::new(),
        }
    }
}

/// The serialized form of [`AccumRecord`].
#[derive(Clone, Serialize)]
pub struct AccumItem<I> {
    // First in every file, and under a name that no optimizer's record has: that is what tells the two kinds apart.
    #[serde(rename = "accumulated")]
    window: Option<WindowItem>,
    #[serde(rename = "optimizer")]
    inner: I,
}

const WINDOW: &str = "accumulated";
const INNER: &str = "optimizer";

#[derive(Clone, Serialize, Deserialize)]
struct WindowItem {
    tally: Tally,
    /// By parameter id, in order, so that equal windows make equal files.
    sums: BTreeMap<String, TensorData>,
}

impl<B, R> Record<B> for AccumRecord<R, B::InnerBackend>
where
    B: AutodiffBackend,
    R: Record<B>,
{
    type Item<S: PrecisionSettings> = AccumItem<R::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        AccumItem {
            window: self.window.map(to_item),
            inner: self.inner.into_item(),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            window: item.window.map(|window| from_item(window, device)),
            inner: R::from_item(item.inner, device),
        }
    }
}

fn to_item<I: Backend>(window: PartialWindow<I>) -> WindowItem {
    let sums = window.sums.into_iter().map(|(id, sum)| {
        let data = read_sync(I::float_into_data(sum.tensor()));
        (
            id.serialize(),
            data.expect("the sums can be read from their device"),
        )
    });
    WindowItem {
        tally: window.tally,
        sums: sums.collect(),
    }
}

fn from_item<I: Backend>(window: WindowItem, device: &I::Device) -> PartialWindow<I> {
    let sums = window.sums.into_iter().map(|(id, data)| {
        let sum = TensorPrimitive::Float(I::float_from_data(data, device));
        (ParamId::deserialize(&id), sum)
    });
    PartialWindow {
        tally: window.tally,
        sums: sums.collect(),
    }
}

impl<'de, I: Deserialize<'de>> Deserialize<'de> for AccumItem<I> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        // Not `#[serde(untagged)]`: formats that do not name fields, such as bincode, cannot read that.
        deserializer.deserialize_struct("AccumItem", &[WINDOW, INNER], ItemVisitor(PhantomData))
    }
}

struct ItemVisitor<I>(PhantomData<I>);

impl<'de, I: Deserialize<'de>> Visitor<'de> for ItemVisitor<I> {
    type Value = AccumItem<I>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the record of an accumulating optimizer, or of the wrapped optimizer alone")
    }

    /// Formats that do not name fields hold nothing but our own record.
    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
        let missing = |index| A::Error::invalid_length(index, &"two fields");
        let window = seq.next_element()?.ok_or_else(|| missing(0))?;
        let inner = seq.next_element()?.ok_or_else(|| missing(1))?;
        Ok(AccumItem { window, inner })
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let first: Option<String> = map.next_key()?;
        if first.as_deref() != Some(WINDOW) {
            let inner = I::deserialize(MapAccessDeserializer::new(Replay::new(first, map)))?;
            return Ok(AccumItem {
                window: None,
                inner,
            });
        }
        let window = map.next_value()?;
        match map.next_key::<String>()?.as_deref() {
            Some(INNER) => Ok(AccumItem {
                window,
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
