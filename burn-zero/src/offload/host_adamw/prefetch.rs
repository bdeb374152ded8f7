//! Memory that is asked for before it is used.

use super::{Gradients, ParamsOut};

/// Asks for the cache line of the element at `index`, if there is one. Changes no value, waits for nothing.
///
/// Only where safe code can say it, which is on x86-64: elsewhere the processor's own prefetcher has to do.
#[inline(always)]
pub(super) fn prefetch<T>(slice: &[T], index: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(element) = slice.get(index) {
        safe_arch::prefetch_t0(element);
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (slice, index);
}

impl Gradients<'_> {
    #[inline(always)]
    pub(super) fn prefetch(&self, index: usize) {
        match self {
            Self::F32(slice) => prefetch(slice, index),
            Self::Bf16(slice) => prefetch(slice, index),
            Self::F16(slice) => prefetch(slice, index),
        }
    }
}

impl ParamsOut<'_> {
    #[inline(always)]
    pub(super) fn prefetch(&self, index: usize) {
        match self {
            Self::Bf16(slice) => prefetch(slice, index),
            Self::F16(slice) => prefetch(slice, index),
        }
    }
}
