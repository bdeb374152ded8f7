//! Whether a device computes at all, and what is missing if it does not.
//!
//! CubeCL panics where a driver, a compiler or a device is missing: on its device's thread, and
//! then on the thread that waits for it. So one small kernel runs first, on a thread of its own,
//! and what the panics say becomes an error.

use std::fmt;
use std::panic;
use std::sync::{Arc, Mutex, PoisonError};

use burn::prelude::Backend;
use burn::tensor::Tensor;

use crate::backend::BackendName;

/// What a backend lacks on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// NVIDIA's driver.
    CudaDriver,
    /// A GPU that the driver of NVIDIA sees.
    CudaDevice,
    /// CUDA's compiler, a library that is loaded at run time.
    Nvrtc,
    /// The headers that kernels include.
    CudaHeaders,
    /// A device with Vulkan, or its driver.
    VulkanDevice,
    /// Something else: the device fails.
    Unknown,
}

impl Missing {
    /// Reads it from what panics said.
    pub fn of(backend: BackendName, said: &str) -> Self {
        let says = |text: &str| said.contains(text);
        match backend {
            BackendName::Cuda if says("load the \"nvrtc\"") => Self::Nvrtc,
            BackendName::Cuda if says("load the \"cuda\"") => Self::CudaDriver,
            BackendName::Cuda
                if says("CUDA_ERROR_NO_DEVICE") || says("CUDA_ERROR_INVALID_DEVICE") =>
            {
                Self::CudaDevice
            }
            BackendName::Cuda
                if says("CUDA_ERROR_SYSTEM_DRIVER_MISMATCH") || says("CUDA_ERROR_STUB_LIBRARY") =>
            {
                Self::CudaDriver
            }
            // The folder is not found, or a file in it.
            BackendName::Cuda
                if says("CUDA installation not found") || says("could not open source file") =>
            {
                Self::CudaHeaders
            }
            BackendName::Vulkan if says("adapter") => Self::VulkanDevice,
            _ => Self::Unknown,
        }
    }
}

impl fmt::Display for Missing {
    /// What is missing, and what to do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CudaDriver => {
                "NVIDIA's driver is missing (libcuda.so.1 cannot be loaded): install the driver, or give a container the GPU (docker run --gpus all)"
            }
            Self::CudaDevice => {
                "NVIDIA's driver sees no GPU: see what `nvidia-smi` says, and CUDA_VISIBLE_DEVICES"
            }
            Self::Nvrtc => {
                "CUDA's compiler is missing (libnvrtc.so cannot be loaded): install the CUDA toolkit, and put its lib64 folder into LD_LIBRARY_PATH"
            }
            Self::CudaHeaders => {
                "CUDA's headers are missing: install the CUDA toolkit, and set CUDA_PATH to its folder, the one with `include`"
            }
            Self::VulkanDevice => {
                "there is no device with Vulkan: install the GPU's Vulkan driver (Debian's mesa-vulkan-drivers has one in software), and see what `vulkaninfo` says"
            }
            Self::Unknown => "the device does not compute",
        })
    }
}

/// A device that does not compute.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[error("--backend {}: {missing}{}; or compute on the CPU with --backend flex", backend.name(), detail(*missing, said))]
pub struct DeviceMissing {
    /// The backend.
    pub backend: BackendName,
    /// What is missing.
    pub missing: Missing,
    /// What the panics said.
    pub said: String,
}

/// Where it is not known what is missing, the first line that was said.
fn detail(missing: Missing, said: &str) -> String {
    match (missing, said.lines().next()) {
        (Missing::Unknown, Some(first)) => format!(" ({first})"),
        _ => String::new(),
    }
}

/// Runs one small kernel, and reads its result.
///
/// # Errors
///
/// The device fails.
pub fn first_kernel<B: Backend>(
    backend: BackendName,
    device: &B::Device,
) -> Result<(), DeviceMissing> {
    let device = device.clone();
    run(backend, move || {
        let ones = Tensor::<B, 1>::ones([2], &device);
        let twice = (ones * 2.0).into_data().convert::<f32>();
        assert_eq!(twice.as_slice::<f32>().ok(), Some(&[2.0, 2.0][..]));
    })
}

/// Runs `kernel` on a thread of its own, whose streams and memory pools are not those of the
/// training. While it runs, panics print nothing.
fn run(backend: BackendName, kernel: impl FnOnce() + Send + 'static) -> Result<(), DeviceMissing> {
    let said = Arc::new(Mutex::new(String::new()));
    let heard = said.clone();
    let prints = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        let mut said = heard.lock().unwrap_or_else(PoisonError::into_inner);
        let message = info.payload_as_str().unwrap_or("a panic without a message");
        said.push_str(message.trim());
        said.push('\n');
    }));
    let ended = std::thread::spawn(kernel).join();
    panic::set_hook(prints);
    let said = said.lock().unwrap_or_else(PoisonError::into_inner).clone();
    ended.map_err(|_| DeviceMissing {
        backend,
        missing: Missing::of(backend, &said),
        said,
    })
}

#[cfg(test)]
mod tests {
    use burn_flex::Flex;

    use super::*;

    /// The messages of cudarc 0.19, cubecl-cuda and cubecl-wgpu 0.10, and the panic that follows on
    /// the thread that waits. One test, because the hook of panics is the process's.
    #[test]
    fn each_missing_thing_is_one_line_that_says_what_to_do() {
        assert_eq!(
            first_kernel::<Flex>(BackendName::Flex, &Default::default()),
            Ok(())
        );
        let waits = "called `Result::unwrap()` on an `Err` value: RecvError";
        for (backend, said, missing, to_do) in [
            (
                BackendName::Cuda,
                "Unable to dynamically load the \"cuda\" shared library - searched for library names: [..]",
                Missing::CudaDriver,
                "install the driver",
            ),
            (
                BackendName::Cuda,
                "called `Result::unwrap()` on an `Err` value: DriverError(CUDA_ERROR_NO_DEVICE, \"no CUDA-capable device is detected\")",
                Missing::CudaDevice,
                "nvidia-smi",
            ),
            (
                BackendName::Cuda,
                "Unable to dynamically load the \"nvrtc\" shared library - searched for library names: [..]",
                Missing::Nvrtc,
                "LD_LIBRARY_PATH",
            ),
            (
                BackendName::Cuda,
                "CUDA installation not found.\n        Please ensure that CUDA is installed",
                Missing::CudaHeaders,
                "CUDA_PATH",
            ),
            (
                BackendName::Cuda,
                "[Compilation Error] \n    default_program(1): catastrophic error: could not open source file \"cuda_runtime.h\"",
                Missing::CudaHeaders,
                "CUDA_PATH",
            ),
            (
                BackendName::Vulkan,
                "No possible adapter available for backend. Falling back to first available.: NotFound",
                Missing::VulkanDevice,
                "mesa-vulkan-drivers",
            ),
            (
                BackendName::Vulkan,
                "the device was lost",
                Missing::Unknown,
                "(the device was lost)",
            ),
        ] {
            let error = run(backend, move || {
                let device = std::thread::spawn(move || panic!("{said}"));
                assert!(device.join().is_err());
                panic!("{waits}");
            });
            let error = error.expect_err("it panics");
            assert_eq!(error.missing, missing, "{said}");
            let line = error.to_string();
            assert_eq!(line.lines().count(), 1, "{line}");
            assert!(
                line.contains(to_do) && line.ends_with("--backend flex"),
                "{line}"
            );
            assert!(!line.contains("RecvError"), "{line}");
        }
    }
}
