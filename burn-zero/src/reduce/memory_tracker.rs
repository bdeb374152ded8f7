//! The bytes of gradients that a rank holds, counted when they are allocated and freed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts bytes. Clones share the count.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryTracker(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
pub(crate) struct TrackedBytes(MemoryTracker, u64);

impl MemoryTracker {
    /// Counts `bytes` until the result is dropped.
    pub(crate) fn hold(&self, bytes: usize) -> TrackedBytes {
        let bytes = bytes as u64;
        let now = self.0.now.fetch_add(bytes, Relaxed) + bytes;
        self.0.peak.fetch_max(now, Relaxed);
        TrackedBytes(self.clone(), bytes)
    }

    /// The maximum of the count so far.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.0.peak.load(Relaxed)
    }
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        self.0.0.now.fetch_sub(self.1, Relaxed);
    }
}
