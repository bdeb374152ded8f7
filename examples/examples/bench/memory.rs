//! The memory of a training.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use peak_alloc::PeakAlloc;
use serde::{Deserialize, Serialize};

use examples::backend::BackendName;
use examples::pools::{Pools, peak_bytes, reset_peak_bytes};

/// Time between two readings of a device: the bytes that a step holds change over milliseconds.
const INTERVAL: Duration = Duration::from_micros(200);

/// The counts of the program's heap, if it has [`PeakAlloc`] as its global allocator.
const HEAP: PeakAlloc = PeakAlloc;

/// The memory in use during some work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watched {
    /// The peak, including what was in use before; `None` where it is not known.
    pub most: Option<Memory>,
    /// The peak beyond what was in use before: tensors in the pools of a GPU; on the CPU the heap,
    /// if the program counts it.
    pub added_bytes: Option<u64>,
}

/// Memory at one moment, or the most of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Where the memory is.
    pub place: Place,
    /// In live tensors; for a process, the peak of its resident memory.
    pub in_use_bytes: u64,
    /// These and the memory that the allocator keeps for reuse, in pages of up to a quarter of the
    /// device; unknown for a process.
    pub reserved_bytes: Option<u64>,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Place {
    /// The pools of a GPU.
    Device,
    /// A process on the host.
    Process,
}

impl Memory {
    /// The most of either.
    fn max(self, other: Self) -> Self {
        Self {
            place: self.place,
            in_use_bytes: self.in_use_bytes.max(other.in_use_bytes),
            reserved_bytes: self.reserved_bytes.max(other.reserved_bytes),
        }
    }
}

/// Measures the memory that `work`, on this thread, holds on the backend's default device.
///
/// A device is sampled while `work` runs, so memory that is held for less than a fraction of a
/// millisecond may be missed. For a process the system records the peak. The heap is counted
/// exactly.
pub fn watch<T>(backend: BackendName, work: impl FnOnce() -> T) -> (Watched, T) {
    // The watcher is another thread.
    let pools = Pools::of_this_thread(backend);
    let before = pools.read();
    reset_peak_bytes();
    HEAP.reset_peak_usage();
    let heap_before = HEAP.current_usage();
    let (most, done) = watch_pools(backend, &pools, work);
    let heap_bytes = HEAP.peak_usage().saturating_sub(heap_before) as u64;
    let added_bytes = match before {
        Some(before) => most.map(|most| most.in_use_bytes.saturating_sub(before.in_use_bytes)),
        // LibTorch's tensors are not on Rust's heap.
        None => (heap_bytes > 0 && backend != BackendName::Tch).then_some(heap_bytes),
    };
    (Watched { most, added_bytes }, done)
}

fn watch_pools<T>(
    backend: BackendName,
    pools: &Pools,
    work: impl FnOnce() -> T,
) -> (Option<Memory>, T) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            let mut most: Option<Memory> = None;
            loop {
                let last = done.load(Ordering::Acquire);
                if let Some(now) = read(backend, pools) {
                    most = Some(most.map_or(now, |most| most.max(now)));
                }
                if last {
                    return most;
                }
                thread::sleep(INTERVAL);
            }
        });
        let finish = Finish(&done);
        let result = work();
        drop(finish);
        (watcher.join().unwrap_or_default(), result)
    })
}

/// Stops the watcher, also if the work panics.
struct Finish<'a>(&'a AtomicBool);

impl Drop for Finish<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// The memory of a device's pools, or of the process.
fn read(backend: BackendName, pools: &Pools) -> Option<Memory> {
    if matches!(backend, BackendName::Flex | BackendName::Tch) {
        return Some(Memory {
            place: Place::Process,
            in_use_bytes: peak_bytes()?,
            reserved_bytes: None,
        });
    }
    pools.read().map(|bytes| Memory {
        place: Place::Device,
        in_use_bytes: bytes.in_use_bytes,
        reserved_bytes: Some(bytes.reserved_bytes),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::turn;

    fn memory(in_use_bytes: u64, reserved_bytes: u64) -> Memory {
        Memory {
            place: Place::Device,
            in_use_bytes,
            reserved_bytes: Some(reserved_bytes),
        }
    }

    #[test]
    fn the_most_of_either_is_kept() {
        assert_eq!(memory(1, 9).max(memory(3, 7)), memory(3, 9));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_process_is_seen_to_grow() {
        let _turn = turn();
        let (watched, ()) = watch(BackendName::Flex, || {
            std::hint::black_box(vec![1u8; 256 << 20]);
        });
        assert!(watched.added_bytes.is_some_and(|bytes| bytes >= 256 << 20));
        let peak = watched.most.unwrap();
        assert_eq!(peak.place, Place::Process);
        assert!(peak.in_use_bytes >= 256 << 20);
        let (watched, ()) = watch(BackendName::Flex, || ());
        assert!(watched.most.unwrap().in_use_bytes < peak.in_use_bytes - (128 << 20));
    }

    #[test]
    #[should_panic(expected = "the work's own")]
    fn a_panic_of_the_work_ends_the_watching() {
        let _turn = turn();
        let work = || -> () { panic!("the work's own") };
        watch(BackendName::Flex, work);
    }
}
