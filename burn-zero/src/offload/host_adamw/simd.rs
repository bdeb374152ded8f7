//! The instructions that the kernel is compiled for, chosen at run time.

use std::fmt;

use pulp::Arch;

/// Instructions that [`HostAdamW`](super::HostAdamW) can be updated with.
///
/// All give the same bits: the kernel's operations are each rounded once, in the same order, and never contracted to
/// fused multiply-adds, which the portable path would have to emulate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum InstructionSet {
    /// x86-64-v4: 512-bit vectors.
    Avx512,
    /// x86-64-v3: 256-bit vectors.
    Avx2,
    /// AArch64's 128-bit vectors.
    Neon,
    /// What the program is compiled for: SSE2 on x86-64 unless told otherwise.
    Portable,
}

impl InstructionSet {
    /// All that this processor has, the fastest first. Never empty.
    ///
    /// AVX2 comes before AVX-512: a step is bound by memory, where twice the width gains nothing. Measured from memory AVX2 is
    /// up to 5 % faster with f32 gradients and as fast with bf16; AVX-512 only wins where all of the state fits into caches.
    pub fn available() -> Vec<Self> {
        let all = [Self::Avx2, Self::Avx512, Self::Neon, Self::Portable];
        all.into_iter().filter(|set| set.arch().is_some()).collect()
    }

    /// The fastest that this processor has.
    pub fn detect() -> Self {
        Self::available()[0]
    }

    /// The dispatcher, if this processor has the instructions.
    pub(super) fn arch(self) -> Option<Arch> {
        match self {
            Self::Portable => Some(Arch::Scalar),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => pulp::x86::V4::try_new().map(Arch::V4),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => pulp::x86::V3::try_new().map(Arch::V3),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => pulp::aarch64::Neon::try_new().map(Arch::Neon),
            #[allow(unreachable_patterns)] // the other architectures' sets
            _ => None,
        }
    }
}

impl fmt::Display for InstructionSet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Avx512 => "AVX-512",
            Self::Avx2 => "AVX2",
            Self::Neon => "NEON",
            Self::Portable => "portable",
        })
    }
}
