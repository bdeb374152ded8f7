//! The record: that of the wrapped optimizer.

use core::fmt;
use core::marker::PhantomData;

use burn::record::{PrecisionSettings, Record};
use burn::tensor::backend::{AutodiffBackend, Backend};

/// The record of an optimizer on the host's backend `A`, as one of any backend: in a file it is that of the optimizer on the
/// device, both ways.
pub struct HostRecord<A, R> {
    pub(super) inner: R,
    host: PhantomData<fn() -> A>,
}

impl<A, R> HostRecord<A, R> {
    pub(super) fn new(inner: R) -> Self {
        Self {
            inner,
            host: PhantomData,
        }
    }
}

impl<A: AutodiffBackend, R: Record<A>, B: Backend> Record<B> for HostRecord<A, R> {
    type Item<S: PrecisionSettings> = R::Item<S>;

    fn into_item<S: PrecisionSettings>(self) -> Self::Item<S> {
        self.inner.into_item::<S>()
    }

    /// On the host's device, whatever this one is.
    fn from_item<S: PrecisionSettings>(item: Self::Item<S>, _device: &B::Device) -> Self {
        Self::new(R::from_item::<S>(item, &Default::default()))
    }
}

impl<A, R: Clone> Clone for HostRecord<A, R> {
    fn clone(&self) -> Self {
        Self::new(self.inner.clone())
    }
}

impl<A, R: fmt::Debug> fmt::Debug for HostRecord<A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}
