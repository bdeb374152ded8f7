//! What is held: the memory of a device as the runtime below the backend sees it, and the heap.

use burn_accum::{MemoryProbe, PeakCounter, SampledGauge};
use peak_alloc::PeakAlloc;

use crate::backend::BackendName;

/// The memory pools of a backend's default device that serve one thread: pools belong to streams, and streams to threads.
#[derive(Clone, Copy, Debug)]
pub struct Pools {
    backend: BackendName,
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    stream: cubecl::stream_id::StreamId,
}

/// What pools hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBytes {
    /// In tensors that live.
    pub in_use_bytes: u64,
    /// That, and what is kept for later, in pages of up to a quarter of the device.
    pub reserved_bytes: u64,
}

impl Pools {
    /// Those of the thread that calls this; any thread may read them.
    pub fn of_this_thread(backend: BackendName) -> Self {
        Self {
            backend,
            #[cfg(any(feature = "cuda", feature = "vulkan"))]
            stream: cubecl::stream_id::StreamId::current(),
        }
    }

    /// What they hold now; nothing on the CPU, which has none.
    pub fn read(&self) -> Option<PoolBytes> {
        match self.backend {
            BackendName::Flex => None,
            #[cfg(feature = "cuda")]
            BackendName::Cuda => self.read_device::<cubecl::cuda::CudaRuntime>(),
            #[cfg(feature = "vulkan")]
            BackendName::Vulkan => self.read_device::<cubecl::wgpu::WgpuRuntime>(),
            #[allow(
                unreachable_patterns,
                reason = "reached unless every backend is compiled in"
            )]
            _ => None,
        }
    }

    /// Runs `task` on this thread and tells the most bytes that these pools reserved in it, everything included that was in use
    /// before; nothing on the CPU. `task` waits for the device itself.
    ///
    /// Counted, not sampled: free pages are given back first, each tensor of the task gets a page of exactly its size, and a page is
    /// kept until the count is read. Tensors of the same size use a page one after the other, others do not: the count is the bytes
    /// in use at most, or above them.
    #[allow(
        unused_variables,
        reason = "without a device there is nothing to count"
    )]
    pub fn most_reserved(&self, task: impl FnOnce() + Send) -> Option<u64> {
        match self.backend {
            BackendName::Flex => None,
            #[cfg(feature = "cuda")]
            BackendName::Cuda => self.most_reserved_of::<cubecl::cuda::CudaRuntime>(task),
            #[cfg(feature = "vulkan")]
            BackendName::Vulkan => self.most_reserved_of::<cubecl::wgpu::WgpuRuntime>(task),
            #[allow(
                unreachable_patterns,
                reason = "reached unless every backend is compiled in"
            )]
            _ => None,
        }
    }

    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    fn most_reserved_of<R: cubecl::Runtime>(&self, task: impl FnOnce() + Send) -> Option<u64> {
        let client = R::client(&R::Device::default());
        client.memory_cleanup();
        // CubeCL's allocations of a size for good: pages of that size, which stay.
        let done = client.memory_persistent_allocation((), |()| task());
        done.ok()?;
        let reserved = self.read().map(|bytes| bytes.reserved_bytes);
        client.memory_cleanup();
        reserved
    }

    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    fn read_device<R: cubecl::Runtime>(&self) -> Option<PoolBytes> {
        let read = || R::client(&R::Device::default()).memory_usage().ok();
        self.stream.executes(read).map(|usage| PoolBytes {
            in_use_bytes: usage.bytes_in_use,
            reserved_bytes: usage.bytes_reserved,
        })
    }
}

/// All memory of the backend's default device; nothing where the runtime does not tell, and on the CPU, which has no pools.
pub fn device_bytes(backend: BackendName) -> Option<u64> {
    match backend {
        // cubecl-cuda 0.10 sets the largest page to a quarter of the device and tells nothing else.
        #[cfg(feature = "cuda")]
        BackendName::Cuda => {
            use cubecl::Runtime;
            let client = cubecl::cuda::CudaRuntime::client(&Default::default());
            Some(4 * client.properties().memory.max_page_size)
        }
        // Vulkan's largest page is that of a binding, whatever the device.
        _ => None,
    }
}

/// What measures the memory of trials on this thread: the pools that serve it, and on the CPU the heap, for programs that
/// have [`PeakAlloc`] as their global allocator.
pub fn memory_probe(backend: BackendName) -> Box<dyn MemoryProbe> {
    match backend {
        BackendName::Flex => Box::new(PeakCounter::new(
            || PeakAlloc.reset_peak_usage(),
            || PeakAlloc.peak_usage() as u64,
        )),
        #[cfg(feature = "tch")]
        BackendName::Tch => {
            // LibTorch allocates past Rust's heap: what the process holds is all that can be asked.
            let resident = || memory_stats::memory_stats().map_or(0, |all| all.physical_mem as u64);
            Box::new(SampledGauge::new(resident))
        }
        _ => {
            let pools = Pools::of_this_thread(backend);
            let in_use = move || pools.read().map_or(0, |bytes| bytes.in_use_bytes);
            Box::new(SampledGauge::new(in_use))
        }
    }
}
