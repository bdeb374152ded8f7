//! The optimizer: its state, and whole steps.

use std::fmt;

use pulp::Arch;
use serde::Serialize;

use super::{
    AdamWStep, Gradients, HostAdamWConfig, HostAdamWError, InstructionSet, OpenStep, ParamsOut,
    buffer::HostBuffer, open_step::same_length,
};

/// AdamW whose f32 master parameters and moments live in host memory, in one flat buffer each, and are updated there:
/// DeepSpeed's `CPUAdam`, PyTorch's `AdamW(fused=True)` on the CPU.
///
/// Fused: a step reads and writes the master and both moments once and reads the gradients once, in f32, bf16 or f16. With
/// [`ParamsOut`] the same pass writes a low-precision copy of the new parameters for the upload.
///
/// Deterministic: neither the number of threads, nor the instructions, nor how a step is cut into ranges changes a bit.
///
/// ```
/// use burn_zero::{AdamWStep, Gradients, HostAdamW, HostAdamWConfig, ParamsOut};
/// use half::bf16;
///
/// let config = HostAdamWConfig { weight_decay: 0.0, ..Default::default() };
/// let mut adamw = HostAdamW::new(config.clone(), &[1.0, -1.0, 0.5])?;
///
/// // Gradients of a loss times 1024, in bf16; the new parameters come back in bf16 too.
/// let gradients = [512.0, -512.0, 0.0].map(bf16::from_f32);
/// let mut uploaded = [bf16::ZERO; 3];
/// let args = AdamWStep { grad_scale: 1.0 / 1024.0, ..config.at(0.25) };
/// adamw.step(args, Gradients::Bf16(&gradients), Some(ParamsOut::Bf16(&mut uploaded)))?;
///
/// // The first step moves each parameter by the learning rate against its gradient's sign.
/// assert_eq!(uploaded.map(f32::from), [0.75, -0.75, 0.5]);
/// assert_eq!(adamw.steps(), 1);
/// # Ok::<(), burn_zero::HostAdamWError>(())
/// ```
///
/// # Cost
///
/// 12 bytes of host memory an element. A step with f32 gradients moves 28 bytes an element and runs at the speed of the
/// memory: on x86-64 each block is asked for while the one before is updated. bf16 in and out saves and adds two each. It
/// runs on the current rayon pool (`pool.install(|| adamw.step(..))` chooses another).
pub struct HostAdamW {
    pub(super) config: HostAdamWConfig,
    pub(super) master: HostBuffer,
    pub(super) moment_1: HostBuffer,
    pub(super) moment_2: HostBuffer,
    pub(super) steps: u64,
    /// Elements that a step had updated when it was given up.
    pub(super) torn_after: Option<usize>,
    pub(super) arch: Arch,
    instruction_set: InstructionSet,
}

/// All that a later run needs to go on bit for bit, borrowed. Slices are of one length, in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
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
    /// [`HostAdamWError::InvalidValue`] for the configuration, [`HostAdamWError::OutOfMemory`].
    pub fn new(config: HostAdamWConfig, master: &[f32]) -> Result<Self, HostAdamWError> {
        config.validate()?;
        let instruction_set = InstructionSet::detect();
        Ok(Self {
            config,
            master: HostBuffer::copy_of(master)?,
            moment_1: HostBuffer::zeros(master.len())?,
            moment_2: HostBuffer::zeros(master.len())?,
            steps: 0,
            torn_after: None,
            arch: arch_of(instruction_set)?,
            instruction_set,
        })
    }

    /// An optimizer that goes on from `state`.
    ///
    /// # Errors
    ///
    /// As [`new`](Self::new) and [`load`](Self::load).
    pub fn from_state(
        config: HostAdamWConfig,
        state: AdamWState<'_>,
    ) -> Result<Self, HostAdamWError> {
        let mut optimizer = Self::new(config, state.master)?;
        optimizer.load(state)?;
        Ok(optimizer)
    }

    /// Updates with `instruction_set` instead of the fastest one; the results are the same.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::NoInstructionSet`] where the processor does not have it.
    pub fn with_instruction_set(
        mut self,
        instruction_set: InstructionSet,
    ) -> Result<Self, HostAdamWError> {
        self.arch = arch_of(instruction_set)?;
        self.instruction_set = instruction_set;
        Ok(self)
    }

    /// The instructions it updates with.
    pub fn instruction_set(&self) -> InstructionSet {
        self.instruction_set
    }

    /// The configuration.
    pub fn config(&self) -> &HostAdamWConfig {
        &self.config
    }

    /// Elements.
    pub fn len(&self) -> usize {
        self.master.len()
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
        &self.master
    }

    /// Master parameters to overwrite, as at the start when rank 0 broadcasts its own.
    pub fn master_mut(&mut self) -> &mut [f32] {
        &mut self.master
    }

    /// First and second moments.
    pub fn moments(&self) -> (&[f32], &[f32]) {
        (&self.moment_1, &self.moment_2)
    }

    /// Updates every element and counts the step. Not to be called is to skip the step: every bit stays.
    ///
    /// The gradients must be finite: an infinite or NaN one ends in the moments, as in PyTorch.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::InvalidValue`], [`LengthMismatch`](HostAdamWError::LengthMismatch) and
    /// [`Torn`](HostAdamWError::Torn). No element has changed then.
    pub fn step(
        &mut self,
        args: AdamWStep,
        gradients: Gradients<'_>,
        out: Option<ParamsOut<'_>>,
    ) -> Result<(), HostAdamWError> {
        same_length("gradients", self.len(), gradients.len())?;
        let mut step = self.begin()?;
        step.update(0, args, gradients, out)?;
        step.finish()?;
        Ok(())
    }

    /// Begins a step that is taken range by range, each as soon as its gradients have arrived.
    ///
    /// ```
    /// use burn_zero::{Gradients, HostAdamW, HostAdamWConfig};
    ///
    /// let config = HostAdamWConfig::default();
    /// let mut adamw = HostAdamW::new(config.clone(), &[0.0; 4])?;
    /// let mut step = adamw.begin()?;
    /// step.update(2, config.at(1e-3), Gradients::F32(&[0.1, -0.1]), None)?;
    /// step.update(0, config.at(1e-3), Gradients::F32(&[0.3, 0.2]), None)?;
    /// assert_eq!(step.finish()?, 1);
    /// # Ok::<(), burn_zero::HostAdamWError>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::Torn`] when an earlier step was given up half way.
    pub fn begin(&mut self) -> Result<OpenStep<'_>, HostAdamWError> {
        self.check_whole()?;
        Ok(OpenStep::new(self))
    }

    fn check_whole(&self) -> Result<(), HostAdamWError> {
        let (step, len) = (self.steps + 1, self.len());
        self.torn_after.map_or(Ok(()), |updated| {
            Err(HostAdamWError::Torn { step, updated, len })
        })
    }

    /// The state, to be written.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::Torn`] when a step was given up half way: it is not to become a record.
    pub fn state(&self) -> Result<AdamWState<'_>, HostAdamWError> {
        self.check_whole()?;
        Ok(AdamWState {
            steps: self.steps,
            master: &self.master,
            moment_1: &self.moment_1,
            moment_2: &self.moment_2,
        })
    }

    /// Goes on from `state`.
    ///
    /// # Errors
    ///
    /// [`HostAdamWError::LengthMismatch`]; nothing is loaded then.
    pub fn load(&mut self, state: AdamWState<'_>) -> Result<(), HostAdamWError> {
        same_length("the master parameters", self.len(), state.master.len())?;
        same_length("the first moment", self.len(), state.moment_1.len())?;
        same_length("the second moment", self.len(), state.moment_2.len())?;
        self.master.assign(state.master);
        self.moment_1.assign(state.moment_1);
        self.moment_2.assign(state.moment_2);
        self.steps = state.steps;
        self.torn_after = None;
        Ok(())
    }
}

impl fmt::Debug for HostAdamW {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("HostAdamW")
            .field("config", &self.config)
            .field("len", &self.len())
            .field("steps", &self.steps)
            .field("torn_after", &self.torn_after)
            .field("instruction_set", &self.instruction_set)
            .finish_non_exhaustive()
    }
}

fn arch_of(wanted: InstructionSet) -> Result<Arch, HostAdamWError> {
    let available = InstructionSet::available;
    wanted
        .arch()
        .ok_or_else(|| HostAdamWError::NoInstructionSet {
            wanted,
            available: available(),
        })
}
