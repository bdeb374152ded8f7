//! The backends that an example can compute on.

use burn::prelude::Backend;
use burn_estimate::MetaDevice;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use crate::first_kernel::{DeviceMissing, first_kernel};

/// What `--backend` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendName {
    /// The CPU, in pure Rust
    Flex,
    /// NVIDIA GPUs
    Cuda,
    /// LibTorch, on a GPU if it sees one, else on the CPU
    Tch,
    /// Any GPU with Vulkan
    Vulkan,
}

/// The device with Fusion, if this build has its estimate.
pub fn with_fusion(device: MetaDevice) -> MetaDevice {
    #[cfg(feature = "fusion")]
    let device = device.fused();
    device
}

/// Work that an example runs on the chosen backend.
pub trait OnBackend {
    /// Its result.
    type Output;

    /// Runs it on the default device.
    fn run<B: Backend>(self, device: B::Device) -> Self::Output;
}

/// Why an example cannot compute on a backend.
#[derive(Debug, thiserror::Error)]
pub enum BackendMissing {
    /// It is not compiled in.
    #[error(
        "this build has no {name} backend; run it with\n    \
         cargo run --release -p examples --features {name} --example {example} -- --backend {name}",
        name = backend.name()
    )]
    NotCompiled {
        /// The backend; its name is also that of the feature.
        backend: BackendName,
        /// The example that was to run on it.
        example: &'static str,
    },

    /// The machine lacks what it needs.
    #[error(transparent)]
    Device(#[from] DeviceMissing),
}

/// Work that does nothing: whether a backend computes.
struct Nothing;

impl OnBackend for Nothing {
    type Output = ();

    fn run<B: Backend>(self, _: B::Device) {}
}

impl BackendName {
    /// The name on the command line and in reports, and of the cargo feature.
    pub fn name(self) -> &'static str {
        match self {
            Self::Flex => "flex",
            Self::Cuda => "cuda",
            Self::Tch => "tch",
            Self::Vulkan => "vulkan",
        }
    }

    /// A device of this backend without memory, for estimates.
    pub fn meta(self) -> MetaDevice {
        match self {
            Self::Cuda => with_fusion(MetaDevice::cuda(0)),
            Self::Vulkan => with_fusion(MetaDevice::wgpu(0)),
            Self::Flex | Self::Tch => MetaDevice::new(0),
        }
    }

    /// Checks that the named example can run on this backend: its device computes.
    ///
    /// # Errors
    ///
    /// As [`run`](Self::run).
    pub fn check(self, example: &'static str) -> Result<(), BackendMissing> {
        self.run(example, Nothing)
    }

    /// Runs `work` of the named example on this backend, after a first small kernel.
    ///
    /// # Errors
    ///
    /// The backend is not compiled in, or its device, a driver or a compiler is missing.
    pub fn run<W: OnBackend>(
        self,
        example: &'static str,
        work: W,
    ) -> Result<W::Output, BackendMissing> {
        match self {
            Self::Flex => Ok(work.run::<burn_flex::Flex>(Default::default())),
            #[cfg(feature = "cuda")]
            Self::Cuda => self.run_on::<burn_cuda::Cuda, W>(Default::default(), work),
            #[cfg(feature = "tch")]
            Self::Tch => {
                let device = match tch::Cuda::is_available() {
                    true => burn_tch::LibTorchDevice::Cuda(0),
                    false => burn_tch::LibTorchDevice::Cpu,
                };
                Ok(work.run::<burn_decorator::tch::Mended<burn_tch::LibTorch>>(device))
            }
            #[cfg(feature = "vulkan")]
            Self::Vulkan => self.run_on::<burn_wgpu::Vulkan, W>(Default::default(), work),
            #[allow(
                unreachable_patterns,
                reason = "reached unless every backend is compiled in"
            )]
            backend => Err(BackendMissing::NotCompiled { backend, example }),
        }
    }

    /// Runs `work` on a GPU, if it computes.
    #[cfg_attr(
        not(any(feature = "cuda", feature = "vulkan")),
        allow(dead_code, reason = "called for a GPU")
    )]
    fn run_on<B: Backend, W: OnBackend>(
        self,
        device: B::Device,
        work: W,
    ) -> Result<W::Output, BackendMissing> {
        first_kernel::<B>(self, &device)?;
        Ok(work.run::<B>(device))
    }
}
