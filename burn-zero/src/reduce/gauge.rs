//! How many bytes of gradients a rank holds, counted where they come and go.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts bytes. Clones count together.
#[derive(Clone, Debug, Default)]
pub(crate) struct Gauge(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    now: AtomicU64,
    peak: AtomicU64,
}

/// Bytes that are there as long as this is.
#[derive(Debug)]
pub(crate) struct Holding {
    gauge: Gauge,
    bytes: u64,
}

impl Gauge {
    /// From now on there are so many bytes more.
    pub(crate) fn hold(&self, bytes: usize) -> Holding {
        let bytes = bytes as u64;
        let now = self.0.now.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.0.peak.fetch_max(now, Ordering::Relaxed);
        Holding {
            gauge: self.clone(),
            bytes,
        }
    }

    /// The most there ever were at once.
    pub(crate) fn peak_bytes(&self) -> u64 {
        self.0.peak.load(Ordering::Relaxed)
    }
}

impl Drop for Holding {
    fn drop(&mut self) {
        self.gauge.0.now.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_of_what_was_there_at_once() {
        let gauge = Gauge::default();
        let first = gauge.hold(10);
        drop(gauge.clone().hold(5));
        assert_eq!(gauge.peak_bytes(), 15);
        drop(first);
        let _last = gauge.hold(12);
        assert_eq!(gauge.peak_bytes(), 15);
    }
}
