//! Host memory for optimizer state.

use std::ops::{Deref, DerefMut};

use memmap2::MmapMut;
use rayon::prelude::*;

use super::{HostAdamWError, kernel::CHUNK};

/// f32 elements in memory of their own: aligned to a page, in huge pages where the system has them (a stream of four
/// arrays is bound by address translation otherwise), and touched once at creation, so that the first step faults no page in.
///
/// Each thread touches what it will update, which places the pages near it on machines of several sockets.
pub(super) struct HostBuffer {
    bytes: MmapMut,
}

impl HostBuffer {
    /// `len` zeros.
    pub(super) fn zeros(len: usize) -> Result<Self, HostAdamWError> {
        let mut buffer = Self::reserve(len)?;
        buffer
            .par_chunks_mut(CHUNK)
            .for_each(|chunk| chunk.fill(0.0));
        Ok(buffer)
    }

    /// A copy of `values`.
    pub(super) fn copy_of(values: &[f32]) -> Result<Self, HostAdamWError> {
        let mut buffer = Self::reserve(values.len())?;
        buffer.assign(values);
        Ok(buffer)
    }

    /// Overwrites all elements. Panics unless there are as many values.
    pub(super) fn assign(&mut self, values: &[f32]) {
        assert_eq!(self.len(), values.len(), "lengths are checked before");
        let pairs = self.par_chunks_mut(CHUNK).zip(values.par_chunks(CHUNK));
        pairs.for_each(|(chunk, values)| chunk.copy_from_slice(values));
    }

    fn reserve(len: usize) -> Result<Self, HostAdamWError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let map = MmapMut::map_anon(bytes)
            .map_err(|source| HostAdamWError::OutOfMemory { bytes, source })?;
        // A kernel without huge pages refuses; ordinary ones do.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self { bytes: map })
    }
}

impl Deref for HostBuffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        bytemuck::cast_slice(&self.bytes)
    }
}

impl DerefMut for HostBuffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.bytes)
    }
}
