//! The bytes of gradients that a rank holds, counted when they are allocated and freed.

use std::sync::Arc;

use parking_lot::Mutex;

/// Counts bytes. Clones share the count.
#[derive(Clone, Debug, Default)]
pub(crate) struct MemoryTracker(Arc<Mutex<Counts>>);

#[derive(Debug, Default)]
struct Counts {
    now: u64,
    peak: u64,
}

/// Bytes that count until this is dropped.
#[derive(Debug)]
pub(crate) struct TrackedBytes(MemoryTracker, u64);

impl MemoryTracker {
    /// Counts `bytes` until the result is dropped.
    pub(crate) fn hold(&self, bytes: usize) -> TrackedBytes {
        let mut counts = self.0.lock();
        counts.now += bytes as u64;
        counts.peak = counts.peak.max(counts.now);
        TrackedBytes(self.clone(), bytes as u64)
    }

    /// The maximum of the count so far.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.0.lock().peak
    }
}

impl Drop for TrackedBytes {
    fn drop(&mut self) {
        self.0.0.lock().now -= self.1;
    }
}
