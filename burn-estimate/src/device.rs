//! A device without memory, and whose kernels it models.

use burn_backend::DeviceOps;
use burn_std::device::{Device, DeviceId};

/// Whose kernels and memory a [`MetaDevice`] models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Kernels {
    /// Those of burn-flex.
    #[default]
    Flex,
    /// Those of CubeCL on Vulkan, Metal and WebGPU.
    Wgpu,
    /// Those of CubeCL on CUDA and ROCm.
    Cuda,
}

/// A device without memory. Devices of different numbers are counted separately.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MetaDevice {
    /// The number of the device.
    pub index: u16,
    /// What it models.
    pub kernels: Kernels,
    /// Whether Fusion joins operations to kernels.
    pub(crate) fusion: bool,
}

impl MetaDevice {
    /// The device of a number, with the kernels of burn-flex.
    pub fn new(index: u16) -> Self {
        Self {
            index,
            kernels: Kernels::Flex,
            fusion: false,
        }
    }

    /// The device of a number, with the kernels of CubeCL on CUDA, without Fusion.
    pub fn cuda(index: u16) -> Self {
        Self {
            kernels: Kernels::Cuda,
            ..Self::new(index)
        }
    }

    /// The device of a number, with the kernels of CubeCL on Vulkan, without Fusion.
    pub fn wgpu(index: u16) -> Self {
        Self {
            kernels: Kernels::Wgpu,
            ..Self::new(index)
        }
    }

    /// The same device with Fusion, as Burn's features `cuda`, `rocm`, `vulkan` and `wgpu` have it:
    /// operations wait in a queue, and results within a kernel take no memory. Of the feature
    /// `fusion`, which compiles CubeCL.
    #[cfg(feature = "fusion")]
    pub fn fused(self) -> Self {
        Self {
            fusion: true,
            ..self
        }
    }
}

impl Device for MetaDevice {
    fn from_id(id: DeviceId) -> Self {
        let kernels = [Kernels::Flex, Kernels::Wgpu, Kernels::Cuda];
        Self {
            index: id.index_id,
            kernels: kernels[usize::from(id.type_id >> 1)],
            fusion: id.type_id & 1 == 1,
        }
    }

    fn to_id(&self) -> DeviceId {
        DeviceId::new(
            (self.kernels as u16) << 1 | u16::from(self.fusion),
            self.index,
        )
    }
}

impl DeviceOps for MetaDevice {}
