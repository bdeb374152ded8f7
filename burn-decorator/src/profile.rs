//! What a device can do: what burn-estimate tells the time of a step from, and burn-checkpoint what
//! it costs to compute a tensor again.

use std::hint::black_box;
use std::time::{Duration, Instant};

use burn_backend::tensor::FloatTensor;
use burn_backend::{Backend, DType, FloatDType, Shape, TensorData, read_sync};

/// What a device can do: for estimates of time, and for a memory budget that compares the costs of
/// operations. The constants are the maker's published figures, for products without sparsity: no
/// kernel reaches them. PCIe's are half of what is published for both directions together. What a
/// launch and [`HostCosts`] take is nominal, and in no data sheet. Neither fused kernels nor TF32
/// nor transfers beside the computation are taken into account.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceProfile {
    /// What one operation takes at least.
    pub launch: Duration,
    /// Bytes a second that kernels read and write.
    pub bytes_per_second: f64,
    /// The same of kernels in f16 and bf16, casts among them: less where these are emulated.
    pub half_bytes_per_second: f64,
    /// Exponentials and the like a second; infinite where reading and writing them takes longer.
    pub functions_per_second: f64,
    /// Elements a second that a kernel reads in another order than they lie in, such as those of a
    /// transposed matrix; infinite as above.
    pub reordered_per_second: f64,
    /// Floating-point operations a second in f32.
    pub f32_flops: f64,
    /// Floating-point operations a second in f16 and bf16.
    pub half_flops: f64,
    /// How data moves between host and device.
    pub link: LinkProfile,
    /// What the host does beside.
    pub host: HostCosts,
}

/// How data moves between the host's memory and the device's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkProfile {
    /// Whether the device has memory of its own.
    pub memory: LinkedMemory,
    /// Bytes a second from the host to the device.
    pub upload_bytes_per_second: f64,
    /// Bytes a second from the device to the host.
    pub read_bytes_per_second: f64,
}

/// Whether a device has memory of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkedMemory {
    /// It has: what moves to the host leaves room on the device.
    Separate,
    /// It computes in the host's memory, as a CPU does: what moves to the host stays in the same
    /// memory, so offload frees nothing there, and a plan should leave it out.
    Shared,
}

impl LinkProfile {
    /// A bus with this speed in each direction.
    const fn bus(bytes_per_second: f64) -> Self {
        Self {
            memory: LinkedMemory::Separate,
            upload_bytes_per_second: bytes_per_second,
            read_bytes_per_second: bytes_per_second,
        }
    }

    /// Seconds of these transfers, one after the other.
    pub fn seconds(&self, uploaded_bytes: f64, read_bytes: f64) -> f64 {
        uploaded_bytes / self.upload_bytes_per_second + read_bytes / self.read_bytes_per_second
    }

    /// The speed of the slower direction.
    pub fn slower_bytes_per_second(&self) -> f64 {
        self.upload_bytes_per_second.min(self.read_bytes_per_second)
    }
}

/// What the host does for a step, beside launching kernels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostCosts {
    /// Whether it runs the kernels itself, so that launching one, recording it and its work add up.
    /// Else the device works meanwhile.
    pub runs_kernels: bool,
    /// To record an operation in a scope of burn-checkpoint.
    pub scope: Duration,
    /// To record an operation under a byte budget.
    pub budget: Duration,
    /// To look at a tensor in search of one to evict.
    pub look: Duration,
    /// Bytes a second of memory that the system gives to the process, at their first use; infinite
    /// where a device keeps its memory.
    pub fresh_bytes_per_second: f64,
}

/// What an operation does on a device.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct KernelWork {
    /// Bytes that it reads and writes. Where there are none it is a view, made on the host.
    pub bytes: f64,
    /// Floating-point operations.
    pub flops: f64,
    /// Exponentials and the like.
    pub functions: f64,
    /// Elements that it reads in another order than they lie in.
    pub reordered: f64,
    /// Whether it computes in f16 or bf16.
    pub is_half: bool,
    /// What the host takes to record it.
    pub recording: Duration,
}

const LAUNCH: Duration = Duration::from_micros(5);

/// Beside a GPU.
const HOST: HostCosts = HostCosts {
    runs_kernels: false,
    scope: Duration::from_nanos(500),
    budget: Duration::from_nanos(1000),
    look: Duration::from_nanos(100),
    fresh_bytes_per_second: f64::INFINITY,
};

impl DeviceProfile {
    /// NVIDIA H100 SXM of 80 GB; f32 without TF32. From "NVIDIA H100 Tensor Core GPU", data sheet,
    /// 2023: 3.35 TB/s, 67 and 1,979 TFLOPS (the latter with sparsity, which is twice that
    /// without), PCIe 5 with 128 GB/s.
    pub const H100: Self = Self {
        launch: LAUNCH,
        bytes_per_second: 3.35e12,
        half_bytes_per_second: 3.35e12,
        functions_per_second: f64::INFINITY,
        reordered_per_second: f64::INFINITY,
        f32_flops: 67e12,
        half_flops: 989e12,
        link: LinkProfile::bus(64e9),
        host: HOST,
    };
    /// NVIDIA A100 SXM of 80 GB; f32 without TF32. From "NVIDIA A100 Tensor Core GPU", data sheet,
    /// 2021: 2,039 GB/s, 19.5 and 312 TFLOPS, PCIe 4 with 64 GB/s.
    pub const A100: Self = Self {
        launch: LAUNCH,
        bytes_per_second: 2.039e12,
        half_bytes_per_second: 2.039e12,
        functions_per_second: f64::INFINITY,
        reordered_per_second: f64::INFINITY,
        f32_flops: 19.5e12,
        half_flops: 312e12,
        link: LinkProfile::bus(32e9),
        host: HOST,
    };
    /// NVIDIA GeForce RTX 4090; halves with sums in f32. From "NVIDIA Ada GPU Architecture", white
    /// paper, 2022: 1,008 GB/s, 82.6 and 165.2 TFLOPS, PCIe 4.
    pub const RTX_4090: Self = Self {
        launch: LAUNCH,
        bytes_per_second: 1.008e12,
        half_bytes_per_second: 1.008e12,
        functions_per_second: f64::INFINITY,
        reordered_per_second: f64::INFINITY,
        f32_flops: 82.6e12,
        half_flops: 165.2e12,
        link: LinkProfile::bus(32e9),
        host: HOST,
    };
    /// NVIDIA GeForce RTX 3090; halves with sums in f32. From "NVIDIA Ampere GA102 GPU
    /// Architecture", white paper, 2020: 936 GB/s, 35.6 and 71 TFLOPS, PCIe 4.
    pub const RTX_3090: Self = Self {
        launch: LAUNCH,
        bytes_per_second: 0.936e12,
        half_bytes_per_second: 0.936e12,
        functions_per_second: f64::INFINITY,
        reordered_per_second: f64::INFINITY,
        f32_flops: 35.6e12,
        half_flops: 71e12,
        link: LinkProfile::bus(32e9),
        host: HOST,
    };

    /// Measures a device: small additions, a large one, exponentials, a transposed copy, and a
    /// product of `size` by `size`; additions, casts and the product also in bf16, where the device
    /// computes in it; uploads and reads of a tensor. Some hundred milliseconds at a `size` of 1024
    /// on a CPU, and the more of 80 MiB and 12 times `size`² bytes. The host's [costs](HostCosts)
    /// of recording, searches and memory are nominal: burn-estimate's `measure` measures them too.
    ///
    /// Device and host share memory if the host runs the kernels itself, or if a tensor on the
    /// device makes the process larger. A GPU in the host's memory is taken for one with memory of
    /// its own where the system does not count its buffers as the process's.
    ///
    /// # Panics
    ///
    /// If the device fails.
    pub fn measure<B: Backend>(device: &B::Device, size: usize) -> Self {
        let seconds = |runs: u32, run: &dyn Fn() -> FloatTensor<B>| {
            let wait = |result| {
                drop(result);
                B::sync(device).expect("the device works");
            };
            wait(run());
            let start = Instant::now();
            (0..runs).for_each(|_| drop(run()));
            wait(run());
            start.elapsed().as_secs_f64() / f64::from(runs + 1)
        };
        let ones = |size| B::float_ones(Shape::new([size, size]), device, FloatDType::F32);
        let (small, large) = (ones(1), ones(size));
        let launch = seconds(1000, &|| B::float_add(small.clone(), small.clone()));
        let elements = size as f64 * size as f64;
        let exponentials = seconds(3, &|| B::float_exp(large.clone()));
        // On a CPU copies in a cache take less.
        let transposed = seconds(3, &|| {
            let rows = Shape::new([size * size]);
            B::float_reshape(B::float_transpose(large.clone()), rows)
        });
        // Bytes and floating-point operations a second.
        let speeds = |ones: FloatTensor<B>, bytes: f64| {
            let sum = seconds(10, &|| B::float_add(ones.clone(), ones.clone()));
            let product = seconds(3, &|| B::float_matmul(ones.clone(), ones.clone()));
            (
                3.0 * bytes * elements / sum,
                2.0 * elements * size as f64 / product,
            )
        };
        let (bytes_per_second, f32_flops) = speeds(large.clone(), 4.0);
        let (half_bytes_per_second, half_flops) = match B::supports_dtype(device, DType::BF16) {
            true => {
                let half = B::float_cast(large.clone(), FloatDType::BF16);
                let cast = seconds(3, &|| B::float_cast(large.clone(), FloatDType::BF16));
                let (bytes, flops) = speeds(half, 2.0);
                (bytes.min((4.0 + 2.0) * elements / cast), flops)
            }
            false => (bytes_per_second, f32_flops),
        };
        let runs_kernels = runs_kernels::<B>(device, &large);
        Self {
            launch: Duration::from_secs_f64(launch),
            bytes_per_second,
            half_bytes_per_second,
            functions_per_second: elements / exponentials,
            reordered_per_second: elements / transposed,
            f32_flops,
            half_flops,
            link: link::<B>(device, size, runs_kernels),
            host: HostCosts {
                runs_kernels,
                ..HOST
            },
        }
    }

    /// Seconds of one operation (a roofline: Williams et al., 2009). Where the host runs kernels
    /// itself, its own work, bytes and arithmetic are one after the other; else the longest of them
    /// counts.
    pub fn seconds(&self, work: &KernelWork) -> f64 {
        let launch = (self.launch + work.recording).as_secs_f64();
        if work.bytes == 0.0 {
            let runs_kernels = self.host.runs_kernels;
            return if runs_kernels { launch } else { 0.0 };
        }
        let (bandwidth, peak) = match work.is_half {
            true => (self.half_bytes_per_second, self.half_flops),
            false => (self.bytes_per_second, self.f32_flops),
        };
        let parts = [
            launch,
            work.bytes / bandwidth,
            work.flops / peak,
            work.functions / self.functions_per_second,
            work.reordered / self.reordered_per_second,
        ];
        match self.host.runs_kernels {
            true => parts.iter().sum(),
            false => parts.into_iter().fold(0.0, f64::max),
        }
    }
}

/// Repetitions of a transfer, of which the fastest counts.
const TRANSFERS: usize = 5;

/// Measures a link by uploads and reads of `size` by `size` elements. Neither speed is above that
/// of a copy in the host's memory: a backend may hand over the host's own buffer, whose bytes
/// somebody has copied before or copies later.
fn link<B: Backend>(device: &B::Device, size: usize, runs_kernels: bool) -> LinkProfile {
    let data = TensorData::new(vec![1.0f32; size * size], [size, size]);
    let sync = || B::sync(device).expect("the device works");
    let (mut copy, mut upload, mut read) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
    for _ in 0..TRANSFERS {
        let start = Instant::now();
        let copied = black_box(data.clone());
        copy = copy.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        let tensor = B::float_from_data(copied, device);
        sync();
        upload = upload.min(start.elapsed().as_secs_f64());
        let start = Instant::now();
        drop(read_sync(B::float_into_data(tensor.clone())).expect("the device works"));
        read = read.min(start.elapsed().as_secs_f64());
        drop(tensor);
    }
    let bytes = (size * size * size_of::<f32>()) as f64;
    let is_shared = runs_kernels || makes_the_process_larger::<B>(device);
    LinkProfile {
        memory: if is_shared {
            LinkedMemory::Shared
        } else {
            LinkedMemory::Separate
        },
        upload_bytes_per_second: bytes / upload.max(copy),
        read_bytes_per_second: bytes / read.max(copy),
    }
}

/// Whether a call returns when its work is done.
fn runs_kernels<B: Backend>(device: &B::Device, matrix: &FloatTensor<B>) -> bool {
    let sync = || B::sync(device).expect("the device works");
    let product = || drop(black_box(B::float_matmul(matrix.clone(), matrix.clone())));
    product();
    sync();
    let start = Instant::now();
    product();
    let called = start.elapsed();
    sync();
    2 * called > start.elapsed()
}

/// Whether a tensor on the device takes memory of the process; `false` where the system does not
/// tell.
fn makes_the_process_larger<B: Backend>(device: &B::Device) -> bool {
    /// More than glibc's heap keeps.
    const BYTES: usize = 40 << 20;
    let tensor = || {
        let tensor = B::float_ones(Shape::new([BYTES / 4]), device, FloatDType::F32);
        B::sync(device).expect("the device works");
        tensor
    };
    // Its memory is kept, so that the next one gets other memory; what a first kernel takes is
    // there by then.
    let first = tensor();
    let before = resident_bytes();
    let second = tensor();
    let grown = resident_bytes().zip(before);
    drop((first, second));
    grown.is_some_and(|(now, before)| now.saturating_sub(before) > BYTES as u64 / 2)
}

/// The memory of the process that is resident, on Linux.
fn resident_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kibibytes: u64 = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kibibytes << 10)
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    #[test]
    fn a_link_takes_each_direction_at_its_speed() {
        let link = LinkProfile {
            read_bytes_per_second: 5e9,
            ..LinkProfile::bus(10e9)
        };
        assert_eq!(link.seconds(20e9, 5e9), 2.0 + 1.0);
        assert_eq!(link.slower_bytes_per_second(), 5e9);
    }

    #[test]
    fn tensors_of_a_cpu_are_memory_of_the_process() {
        assert_eq!(
            cfg!(target_os = "linux"),
            makes_the_process_larger::<Flex>(&Default::default())
        );
    }
}
