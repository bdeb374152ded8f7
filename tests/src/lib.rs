//! Backends, models and comparisons for the tests of the laws.

#[macro_use]
mod retype;

pub mod after;
pub mod compare;
pub mod defaults;
pub mod docs;
pub mod models;
pub mod queue;
pub mod spy;

/// Runs generic test functions on every backend of this machine:
/// `on_every_backend!(name, other_name);` expects `fn name<B>()`, generic over an inner backend,
/// and makes one test per backend.
///
/// Flex always; LibTorch on the CPU with feature `tch`; CubeCL with and without Fusion on Vulkan
/// with feature `vulkan`; CUDA with feature `cuda`.
#[macro_export]
macro_rules! on_every_backend {
    ($($law:ident),+ $(,)?) => {
        $crate::on_counted_backends!($($law),+);
        #[cfg(feature = "tch")]
        mod tch {
            $(#[test] fn $law() { super::$law::<$crate::LibTorch>() })+
        }
    };
}

/// As [`on_every_backend!`], without LibTorch: for laws about bytes, which LibTorch does not report
/// on the CPU.
#[macro_export]
macro_rules! on_counted_backends {
    ($($law:ident),+ $(,)?) => {
        mod flex {
            $(#[test] fn $law() { super::$law::<burn_flex::Flex>() })+
        }
        #[cfg(feature = "vulkan")]
        mod vulkan_fusion {
            $(#[test] fn $law() { super::$law::<$crate::VulkanFusion>() })+
        }
        #[cfg(feature = "vulkan")]
        mod vulkan {
            $(#[test] fn $law() { super::$law::<$crate::Vulkan>() })+
        }
        #[cfg(feature = "cuda")]
        mod cuda {
            $(#[test] fn $law() { super::$law::<burn_cuda::Cuda>() })+
        }
    };
}

/// Whether a backend computes on Vulkan. Laws of many steps take fewer there: in software a step
/// takes some ten times as long as on Flex.
pub fn is_vulkan<B: burn::tensor::backend::Backend>() -> bool {
    B::name(&B::Device::default()).contains("wgpu")
}

/// LibTorch without the faults of burn-tch.
#[cfg(feature = "tch")]
pub type LibTorch = burn_decorator::tch::Mended<burn_tch::LibTorch>;

/// CubeCL with Fusion.
#[cfg(feature = "vulkan")]
pub type VulkanFusion = burn_wgpu::Vulkan;

/// CubeCL alone.
#[cfg(feature = "vulkan")]
pub type Vulkan = burn_wgpu::CubeBackend<burn_wgpu::WgpuRuntime, f32, i32, u8>;
