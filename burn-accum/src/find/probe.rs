//! Measures how many bytes are in use. No burn import.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

/// Time between two readings of a gauge: the bytes that a step holds change over milliseconds.
const INTERVAL: Duration = Duration::from_micros(200);

/// Measures the most bytes that are in use during a trial, everything included that was in use
/// before.
///
/// - [`PeakCounter`]: exact, where allocations are counted. On the CPU by a counting allocator.
/// - [`SampledGauge`]: sampled, where only the bytes in use now are known. On CubeCL's backends
///   those of the device's pools.
///
/// Resident memory (`VmHWM`) is not suitable: an allocator keeps freed memory, so a trial would
/// include that of earlier trials.
pub trait MemoryProbe {
    /// Begins a trial: forgets earlier peaks and returns the bytes in use.
    fn begin(&mut self) -> u64;

    /// Ends the trial and returns the most bytes that were in use since it began.
    fn end(&mut self) -> u64;
}

/// Counts every allocation: exact, and the same on every run.
///
/// A library cannot count those of the process, but a program can: a `#[global_allocator]` that
/// counts, such as that of the crate `peak_alloc`.
///
/// ```
/// # struct PeakAlloc;
/// # impl PeakAlloc { fn reset_peak_usage(&self) {} fn peak_usage(&self) -> usize { 0 } }
/// use burn_accum::PeakCounter;
///
/// // #[global_allocator]
/// static HEAP: PeakAlloc = PeakAlloc;
///
/// let probe = PeakCounter::new(|| HEAP.reset_peak_usage(), || HEAP.peak_usage() as u64);
/// # let _ = probe;
/// ```
#[derive(Debug, Clone)]
pub struct PeakCounter<R, P> {
    reset: R,
    peak_bytes: P,
}

impl<R: FnMut(), P: FnMut() -> u64> PeakCounter<R, P> {
    /// `reset` sets the peak to what is in use now; `peak_bytes` tells the most in use since.
    pub fn new(reset: R, peak_bytes: P) -> Self {
        Self { reset, peak_bytes }
    }
}

impl<R: FnMut(), P: FnMut() -> u64> MemoryProbe for PeakCounter<R, P> {
    fn begin(&mut self) -> u64 {
        (self.reset)();
        (self.peak_bytes)()
    }

    fn end(&mut self) -> u64 {
        (self.peak_bytes)()
    }
}

/// Reads a gauge some thousand times a second on its own thread. It may miss memory that is held
/// for less than a fraction of a millisecond, which the margin has to cover.
///
/// ```
/// use burn_accum::{MemoryProbe, SampledGauge};
/// # fn bytes_in_use() -> u64 { 3 }
///
/// // With cubecl, for the stream of the thread that trains:
/// // let client = CudaRuntime::client(&device);
/// // let stream = StreamId::current();
/// // let read = move || stream.executes(|| client.memory_usage().map_or(0, |usage| usage.bytes_in_use));
/// let mut probe = SampledGauge::new(bytes_in_use);
/// assert_eq!(probe.begin(), 3);
/// assert_eq!(probe.end(), 3);
/// ```
pub struct SampledGauge {
    bytes_in_use: Arc<dyn Fn() -> u64 + Send + Sync>,
    watcher: Option<Watcher>,
}

struct Watcher {
    done: Arc<AtomicBool>,
    most: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl SampledGauge {
    /// `bytes_in_use` is asked from another thread.
    pub fn new(bytes_in_use: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Self {
            bytes_in_use: Arc::new(bytes_in_use),
            watcher: None,
        }
    }

    fn stop(&mut self) -> u64 {
        let Some(watcher) = self.watcher.take() else {
            return 0;
        };
        watcher.done.store(true, Ordering::Release);
        // If the gauge panicked, its readings until then still count.
        let _ = watcher.thread.join();
        watcher.most.load(Ordering::Acquire)
    }
}

impl MemoryProbe for SampledGauge {
    fn begin(&mut self) -> u64 {
        self.stop();
        let before = (self.bytes_in_use)();
        let done = Arc::new(AtomicBool::new(false));
        let most = Arc::new(AtomicU64::new(before));
        let watch = {
            let (done, most, read) = (done.clone(), most.clone(), self.bytes_in_use.clone());
            move || {
                while !done.load(Ordering::Acquire) {
                    most.fetch_max(read(), Ordering::AcqRel);
                    thread::sleep(INTERVAL);
                }
            }
        };
        self.watcher = Some(Watcher {
            done,
            most,
            thread: thread::spawn(watch),
        });
        before
    }

    fn end(&mut self) -> u64 {
        let now = (self.bytes_in_use)();
        self.stop().max(now)
    }
}

impl Drop for SampledGauge {
    fn drop(&mut self) {
        self.stop();
    }
}

impl core::fmt::Debug for SampledGauge {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("SampledGauge").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gauge_keeps_the_most_of_one_trial() {
        let level = Arc::new(AtomicU64::new(5));
        let looks = Arc::new(AtomicU64::new(0));
        let mut probe = SampledGauge::new({
            let (level, looks) = (level.clone(), looks.clone());
            move || {
                let level = level.load(Ordering::Acquire);
                looks.fetch_add(1, Ordering::AcqRel);
                level
            }
        });
        assert_eq!(probe.begin(), 5);
        level.store(9, Ordering::Release);
        // The first look to end may have begun before the store, and the third ends after what the
        // second saw is kept.
        let enough = looks.load(Ordering::Acquire) + 3;
        while looks.load(Ordering::Acquire) < enough {
            thread::sleep(INTERVAL);
        }
        level.store(4, Ordering::Release);
        assert_eq!(probe.end(), 9);
        assert_eq!((probe.begin(), probe.end()), (4, 4), "a new trial");
    }

    #[test]
    fn a_gauge_that_panics_ends_no_trial() {
        let _turn = crate::find::tests::panics();
        let mut probe = SampledGauge::new({
            let asked = AtomicU64::new(0);
            move || match asked.fetch_add(1, Ordering::AcqRel) {
                1 => panic!("the device is gone"),
                asked => asked,
            }
        });
        assert_eq!(probe.begin(), 0);
        while !probe.watcher.as_ref().unwrap().thread.is_finished() {
            thread::yield_now();
        }
        assert_eq!(probe.end(), 2);
    }
}
