//! The saved state: the partial window beside the wrapped optimizer's record. It can also be read
//! from a record of that optimizer alone.

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

use burn_decorator::exact::Exact;
use burn_decorator::gradient;
use burn_decorator::record::{OwnState, WrappedItem};
use serde::{Deserialize, Serialize};

use crate::{sums::Sums, tally::Tally};

/// The record of a [`MultiSteps`](crate::MultiSteps): training resumed from it, at any micro-step
/// of a window, continues as if it had not stopped. The accumulators are stored as they are, f32,
/// and the wrapped optimizer's state in full precision, also by recorders of half precision, in
/// whose f16 second moments would become 0.
///
/// The configuration is not in it. Under another window length the partial window is kept: it ends
/// when the new length is reached, or at the next micro-step if it is already exceeded.
///
/// Files that the wrapped optimizer's own record was written to can be loaded as well, if their
/// format names fields (Burn's `NamedMpk` and JSON recorders, compressed or not); the window is
/// then empty. The other way round is not possible.
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

/// The serialized form of [`PartialWindow`].
#[derive(Clone, Serialize, Deserialize)]
pub struct WindowItem {
    tally: Tally,
    /// By parameter id, in order, so that equal windows make equal files.
    sums: BTreeMap<String, TensorData>,
}

impl<B, R> Record<B> for AccumRecord<R, B::InnerBackend>
where
    B: AutodiffBackend,
    R: Record<B>,
{
    type Item<S: PrecisionSettings> = WrappedItem<WindowItem, <Exact<R> as Record<B>>::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        WrappedItem {
            own: self.window.map(to_item),
            inner: <Exact<R> as Record<B>>::into_item(Exact(self.inner)),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            window: item.own.map(|window| from_item(window, device)),
            inner: <Exact<R> as Record<B>>::from_item(item.inner, device).into_inner(),
        }
    }
}

impl OwnState for WindowItem {
    const FIELD: &'static str = "accumulated";
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
        let sum = gradient::load(|| I::float_from_data(data, device));
        let sum = TensorPrimitive::Float(sum);
        (ParamId::deserialize(&id), sum)
    });
    PartialWindow {
        tally: window.tally,
        sums: sums.collect(),
    }
}
