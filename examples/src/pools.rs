//! Memory in use: of a device, as the runtime below the backend reports it, and of the heap.

use std::fs;

use burn_accum::{MemoryProbe, PeakCounter, SampledGauge, host_memory_bytes};
use burn_estimate::CubePools;
use peak_alloc::PeakAlloc;

use crate::backend::BackendName;

/// The memory pools of a backend's default device that serve one thread: pools belong to streams,
/// and streams to threads.
#[derive(Clone, Copy, Debug)]
pub struct Pools {
    backend: BackendName,
    #[cfg(any(feature = "cuda", feature = "vulkan"))]
    stream: cubecl::stream_id::StreamId,
}

/// Bytes in memory pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolBytes {
    /// In live tensors.
    pub in_use_bytes: u64,
    /// These and the memory kept for reuse, in pages of up to a quarter of the device.
    pub reserved_bytes: u64,
}

impl Pools {
    /// The pools of the calling thread; any thread may read them.
    pub fn of_this_thread(backend: BackendName) -> Self {
        Self {
            backend,
            #[cfg(any(feature = "cuda", feature = "vulkan"))]
            stream: cubecl::stream_id::StreamId::current(),
        }
    }

    /// The bytes now; `None` on the CPU, which has no pools.
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

    /// How the pools of the default device make pages; `None` on the CPU.
    pub fn layout(&self) -> Option<CubePools> {
        match self.backend {
            BackendName::Flex => None,
            #[cfg(feature = "cuda")]
            BackendName::Cuda => Some(layout_of::<cubecl::cuda::CudaRuntime>()),
            #[cfg(feature = "vulkan")]
            BackendName::Vulkan => Some(layout_of::<cubecl::wgpu::WgpuRuntime>()),
            #[allow(
                unreachable_patterns,
                reason = "reached unless every backend is compiled in"
            )]
            _ => None,
        }
    }

    /// Runs `task` on this thread and returns the most bytes that these pools reserved in it,
    /// including those in use before; `None` on the CPU. `task` must wait for the device itself.
    ///
    /// The count is not sampled: free pages are released first, each tensor of the task gets a page
    /// of exactly its size, and a page is kept until the count is read. Only tensors of the same
    /// size reuse a page, so the count is at least the peak of the bytes in use.
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
        // CubeCL's persistent allocations: pages of exactly the tensor's size, which are kept.
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

#[cfg(any(feature = "cuda", feature = "vulkan"))]
fn layout_of<R: cubecl::Runtime>() -> CubePools {
    let client = R::client(&R::Device::default());
    let memory = &client.properties().memory;
    CubePools {
        max_page_bytes: memory.max_page_size,
        alignment: memory.alignment,
    }
}

/// All memory of the backend's default device, for burn-flex that of the host; `None` where it is
/// not reported.
pub fn device_bytes(backend: BackendName) -> Option<u64> {
    match backend {
        BackendName::Flex => host_memory_bytes(),
        // cubecl-cuda 0.10 reports only the largest page, which is a quarter of the device.
        #[cfg(feature = "cuda")]
        BackendName::Cuda => {
            use cubecl::Runtime;
            let client = cubecl::cuda::CudaRuntime::client(&Default::default());
            Some(4 * client.properties().memory.max_page_size)
        }
        // Vulkan's largest page is the limit of a binding, which does not depend on the device's
        // memory.
        _ => None,
    }
}

/// Says the bytes in use on the backend's default device by this thread; on the CPU those of the
/// heap, for programs with [`PeakAlloc`] as their global allocator, and with LibTorch the process's
/// resident memory.
pub fn bytes_in_use(backend: BackendName) -> Box<dyn Fn() -> u64 + Send + Sync> {
    match backend {
        BackendName::Flex => Box::new(|| PeakAlloc.current_usage() as u64),
        #[cfg(feature = "tch")]
        BackendName::Tch => {
            // LibTorch does not allocate on Rust's heap.
            Box::new(|| memory_stats::memory_stats().map_or(0, |all| all.physical_mem as u64))
        }
        _ => {
            let pools = Pools::of_this_thread(backend);
            Box::new(move || pools.read().map_or(0, |bytes| bytes.in_use_bytes))
        }
    }
}

/// The probe for the memory of trials on this thread: it reads the thread's pools, or on the CPU
/// the heap, for programs with [`PeakAlloc`] as their global allocator.
pub fn memory_probe(backend: BackendName) -> Box<dyn MemoryProbe> {
    match backend {
        BackendName::Flex => Box::new(PeakCounter::new(
            || PeakAlloc.reset_peak_usage(),
            || PeakAlloc.peak_usage() as u64,
        )),
        _ => Box::new(SampledGauge::new(bytes_in_use(backend))),
    }
}

/// Begins a new peak of this process's resident memory. Elsewhere than on Linux there is none, and
/// nothing happens.
pub fn reset_peak_bytes() {
    // `proc_pid_clear_refs(5)`; a system that forbids it keeps the peak since the process began.
    let _ = fs::write("/proc/self/clear_refs", "5");
}

/// The peak of this process's resident memory since [`reset_peak_bytes`], which only Linux records.
pub fn peak_bytes() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kibibytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kibibytes * 1024)
}
