//! The saved state of a wrapped optimizer: the scaler's state beside the optimizer's record. It can
//! also be read from a record of the optimizer alone.

use burn::{
    record::{PrecisionSettings, Record},
    tensor::backend::Backend,
};
use burn_decorator::exact::Exact;
use burn_decorator::record::{OwnState, WrappedItem};

use super::state::ScalerState;

/// The record of a [`ScaledOptimizer`](crate::ScaledOptimizer): training resumed from it continues
/// as if it had not stopped. Recorders of half precision, such as Burn's `CompactRecorder`, store
/// it in full precision: f16 would round second moments to 0.
///
/// Files that the wrapped optimizer's own record was written to can be loaded as well, if their
/// format names fields (Burn's `NamedMpk` and JSON recorders, compressed or not); the scale then
/// starts from its initial value. The other way round is not possible.
#[derive(Clone, Debug)]
pub struct ScaledRecord<R> {
    /// The scaler's state; `None` if it is disabled, or if the file is one of the optimizer alone.
    pub scaler: Option<ScalerState>,
    /// The optimizer's own record.
    pub inner: R,
}

impl OwnState for ScalerState {
    const FIELD: &'static str = "loss_scaler";
}

impl<B: Backend, R: Record<B>> Record<B> for ScaledRecord<R> {
    type Item<S: PrecisionSettings> = WrappedItem<ScalerState, <Exact<R> as Record<B>>::Item<S>>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        WrappedItem {
            own: self.scaler,
            inner: <Exact<R> as Record<B>>::into_item(Exact(self.inner)),
        }
    }

    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, device: &B::Device) -> Self {
        Self {
            scaler: item.own,
            inner: <Exact<R> as Record<B>>::from_item(item.inner, device).into_inner(),
        }
    }
}
