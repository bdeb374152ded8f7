//! AdamW over flat buffers in host memory: fused, multi-threaded, SIMD chosen at run time.

mod kernel;

use burn_ranks::BufferLength;
use memmap2::MmapMut;
use pulp::Arch;
use rayon::prelude::*;

use super::{HostAdamWConfig, not_negative};
use crate::error::ZeroError;
use kernel::{CHUNK, Factors};

pub use kernel::{Gradients, ParamsOut};

/// AdamW whose f32 master parameters and moments live in host memory, in one flat buffer each, and
/// are updated there: DeepSpeed's `CPUAdam`, PyTorch's `AdamW(fused=True)` on the CPU.
///
/// Fused: a step reads and writes the master and both moments once and reads the gradients once, in
/// f32, bf16 or f16. With [`ParamsOut`] the same pass writes a low-precision copy of the new
/// parameters for the upload.
///
/// Deterministic: neither the number of threads nor the instructions change a bit.
///
/// ```
/// use burn_zero::{Gradients, HostAdamW, HostAdamWConfig, ParamsOut};
/// use half::bf16;
///
/// let config = HostAdamWConfig { weight_decay: 0.0, ..Default::default() };
/// let mut adamw = HostAdamW::new(config, &[1.0, -1.0, 0.5])?;
///
/// // Gradients in bf16; the new parameters come back in bf16 too.
/// let gradients = [0.5, -0.5, 0.0].map(bf16::from_f32);
/// let mut uploaded = [bf16::ZERO; 3];
/// adamw.step(0.25, Gradients::Bf16(&gradients), Some(ParamsOut::Bf16(&mut uploaded)))?;
///
/// // The first step moves each parameter by the learning rate against its gradient's sign.
/// assert_eq!(uploaded.map(f32::from), [0.75, -0.75, 0.5]);
/// assert_eq!(adamw.steps(), 1);
/// # Ok::<(), burn_zero::ZeroError>(())
/// ```
///
/// # Cost
///
/// 12 bytes of host memory an element. A step with f32 gradients moves 28 bytes an element and runs
/// at the speed of the memory: on x86-64 each block is prefetched while the previous one is
/// updated. bf16 gradients save 2 bytes, a bf16 output adds 2. It runs on the current rayon pool
/// (`pool.install(|| adamw.step(..))` chooses another).
#[derive(Debug)]
pub struct HostAdamW {
    config: HostAdamWConfig,
    /// Master parameters, first and second moments.
    state: [Pages; 3],
    steps: u64,
    arch: Arch,
}

/// The state with which a later run continues bit for bit, borrowed. Slices of one length, in f32.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamWState<'a> {
    /// Steps taken.
    pub steps: u64,
    /// Master parameters.
    pub master: &'a [f32],
    /// Mean of the gradients (PyTorch's `exp_avg`).
    pub moment_1: &'a [f32],
    /// Mean of the squared gradients (PyTorch's `exp_avg_sq`).
    pub moment_2: &'a [f32],
}

impl HostAdamW {
    /// An optimizer of a copy of `master`, before its first step: moments of zero.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`] for the configuration, [`ZeroError::OutOfMemory`].
    pub fn new(config: HostAdamWConfig, master: &[f32]) -> Result<Self, ZeroError> {
        let zeros = || Pages::zeros(master.len());
        Self::of(config, 0, [Pages::copy_of(master)?, zeros()?, zeros()?])
    }

    /// An optimizer that continues from a copy of `state`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new), and [`ZeroError::BufferLength`].
    pub fn from_state(config: HostAdamWConfig, state: AdamWState<'_>) -> Result<Self, ZeroError> {
        let len = state.master.len();
        same_length("the first moment", len, state.moment_1.len())?;
        same_length("the second moment", len, state.moment_2.len())?;
        let [master, moment_1, moment_2] =
            [state.master, state.moment_1, state.moment_2].map(Pages::copy_of);
        Self::of(config, state.steps, [master?, moment_1?, moment_2?])
    }

    fn of(config: HostAdamWConfig, steps: u64, state: [Pages; 3]) -> Result<Self, ZeroError> {
        config.validate()?;
        Ok(Self {
            config,
            state,
            steps,
            arch: fastest(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &HostAdamWConfig {
        &self.config
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.master().len()
    }

    /// Whether there are none: a shard may be empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Steps taken.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Master parameters.
    pub fn master(&self) -> &[f32] {
        self.state[0].elements()
    }

    /// Master parameters, mutable: for example to overwrite them with rank 0's.
    pub fn master_mut(&mut self) -> &mut [f32] {
        self.state[0].elements_mut()
    }

    /// First and second moments.
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (self.state[1].elements(), self.state[2].elements())
    }

    /// The state, to be written or copied.
    pub fn state(&self) -> AdamWState<'_> {
        let (moment_1, moment_2) = self.moments();
        AdamWState {
            steps: self.steps,
            master: self.master(),
            moment_1,
            moment_2,
        }
    }

    /// Updates every element and counts the step. To skip a step, do not call it: no bit changes.
    ///
    /// The gradients must be finite: an infinite or NaN one makes the moments non-finite, as in
    /// PyTorch.
    ///
    /// # Errors
    ///
    /// [`ZeroError::InvalidSetting`], [`ZeroError::BufferLength`]; no element has changed.
    pub fn step(
        &mut self,
        learning_rate: f64,
        gradients: Gradients<'_>,
        out: Option<ParamsOut<'_>>,
    ) -> Result<(), ZeroError> {
        not_negative("learning_rate", learning_rate)?;
        same_length("gradients", self.len(), gradients.len())?;
        if let Some(out) = &out {
            same_length("the low-precision parameters", self.len(), out.len())?;
        }
        let factors = Factors::new(&self.config, learning_rate, self.steps + 1);
        let state = self.state.each_mut().map(Pages::elements_mut);
        kernel::update(self.arch, factors, gradients, state, out);
        self.steps += 1;
        Ok(())
    }
}

/// The instructions to update with. AVX2 comes before AVX-512: a step is bound by memory, where
/// twice the width gains nothing. Measured from memory AVX2 is up to 5 % faster with f32 gradients
/// and as fast with bf16.
///
/// All give the same bits: the kernel's operations are each rounded once, in the same order, and
/// never contracted to fused multiply-adds.
fn fastest() -> Arch {
    #[cfg(target_arch = "x86_64")]
    if let Some(avx2) = pulp::x86::V3::try_new() {
        return Arch::V3(avx2);
    }
    Arch::new()
}

fn same_length(what: &'static str, expected: usize, actual: usize) -> Result<(), ZeroError> {
    if expected == actual {
        return Ok(());
    }
    Err(BufferLength {
        call: format!("HostAdamW, {what}"),
        elements: actual,
        expected: format!("{expected} are needed"),
    }
    .into())
}

/// f32 elements in memory of their own: aligned to a page, in huge pages where the system has them
/// (a stream of four arrays is bound by address translation otherwise), and touched once at
/// creation, so that the first step has no page faults.
///
/// Each thread touches the elements that it will update, which places their pages near it on
/// machines with several sockets.
#[derive(Debug)]
struct Pages(MmapMut);

impl Pages {
    fn zeros(len: usize) -> Result<Self, ZeroError> {
        let mut pages = Self::reserve(len)?;
        let chunks = pages.elements_mut().par_chunks_mut(CHUNK);
        chunks.for_each(|chunk| chunk.fill(0.0));
        Ok(pages)
    }

    fn copy_of(values: &[f32]) -> Result<Self, ZeroError> {
        let mut pages = Self::reserve(values.len())?;
        copy(values, pages.elements_mut());
        Ok(pages)
    }

    fn reserve(len: usize) -> Result<Self, ZeroError> {
        let bytes = len.saturating_mul(size_of::<f32>());
        let map = MmapMut::map_anon(bytes).map_err(|error| ZeroError::OutOfMemory {
            what: "HostAdamW, 12 bytes an element".to_owned(),
            bytes,
            reason: error.to_string(),
        })?;
        // Fails on a kernel without huge pages; then ordinary pages are used.
        #[cfg(target_os = "linux")]
        let _ = map.advise(memmap2::Advice::HugePage);
        Ok(Self(map))
    }

    fn elements(&self) -> &[f32] {
        bytemuck::cast_slice(&self.0)
    }

    fn elements_mut(&mut self) -> &mut [f32] {
        bytemuck::cast_slice_mut(&mut self.0)
    }
}

/// Copies on all threads: one thread does not reach the bandwidth of the memory.
pub(super) fn copy(from: &[f32], to: &mut [f32]) {
    let chunks = to.par_chunks_mut(CHUNK).zip(from.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| to.copy_from_slice(from));
}
