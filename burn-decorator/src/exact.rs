//! Records whose numbers no recorder rounds to half precision. With the feature `module`.
//!
//! Burn's `CompactRecorder` and every other recorder of half precision store tensors in f16. Of a
//! model that costs digits; of an optimizer it costs the state: second moments are squares of
//! gradients, f16 rounds those below 3e-8 to 0, and the first step after a resume divides by the
//! `epsilon` alone. So the records of the optimizers and of the optimizer decorators of these
//! crates store what they hold in its own type, or in f32 where Burn's records leave no choice.

use core::fmt;
use core::marker::PhantomData;

use burn::record::{FullPrecisionSettings, PrecisionSettings, Record};
use burn::tensor::{DType, Element, backend::Backend};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A record that recorders of half precision store in full precision; others store it as they
/// always do.
///
/// Its files are those of the record inside: either can be loaded from the other's, whatever their
/// precisions, because tensors in a file name their type.
#[derive(Clone, Debug, PartialEq)]
pub struct Exact<R>(pub R);

impl<R> Exact<R> {
    /// The record inside.
    pub fn into_inner(self) -> R {
        self.0
    }
}

impl<R> From<R> for Exact<R> {
    fn from(record: R) -> Self {
        Self(record)
    }
}

impl<B: Backend, R: Record<B>> Record<B> for Exact<R> {
    type Item<S: PrecisionSettings> = ExactItem<R::Item<FullPrecisionSettings>, R::Item<S>, S>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        if is_half::<S>() {
            ExactItem::Full(self.0.into_item())
        } else {
            ExactItem::AsAsked(self.0.into_item(), PhantomData)
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self(match item {
            ExactItem::Full(item) => R::from_item(item, device),
            ExactItem::AsAsked(item, _) => R::from_item(item, device),
        })
    }
}

/// Whether recorders with these settings round to 16 bits.
fn is_half<S: PrecisionSettings>() -> bool {
    matches!(S::FloatElem::dtype(), DType::F16 | DType::BF16)
}

/// The serialized record of an [`Exact`]: without a trace of which variant it is, because the
/// settings of the recorder say it.
pub enum ExactItem<F, R, S> {
    /// In full precision: the recorder asked for half.
    Full(F),
    /// In the precision that the recorder asked for.
    AsAsked(R, PhantomData<S>),
}

impl<F: Clone, R: Clone, S> Clone for ExactItem<F, R, S> {
    fn clone(&self) -> Self {
        match self {
            Self::Full(item) => Self::Full(item.clone()),
            Self::AsAsked(item, _) => Self::AsAsked(item.clone(), PhantomData),
        }
    }
}

impl<F: fmt::Debug, R: fmt::Debug, S> fmt::Debug for ExactItem<F, R, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full(item) => item.fmt(f),
            Self::AsAsked(item, _) => item.fmt(f),
        }
    }
}

impl<F: Serialize, R: Serialize, S> Serialize for ExactItem<F, R, S> {
    fn serialize<T: Serializer>(&self, serializer: T) -> Result<T::Ok, T::Error> {
        match self {
            Self::Full(item) => item.serialize(serializer),
            Self::AsAsked(item, _) => item.serialize(serializer),
        }
    }
}

impl<'de, F, R, S> Deserialize<'de> for ExactItem<F, R, S>
where
    F: Deserialize<'de>,
    R: Deserialize<'de>,
    S: PrecisionSettings,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        if is_half::<S>() {
            F::deserialize(deserializer).map(Self::Full)
        } else {
            R::deserialize(deserializer).map(|item| Self::AsAsked(item, PhantomData))
        }
    }
}
