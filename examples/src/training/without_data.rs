//! An update of a training, with its whole stack, run without data.

use std::collections::BTreeMap;
use std::sync::Arc;

use burn::module::AutodiffModule;
use burn::optim::GradientsParams;
use burn::tensor::TensorMetadata;
use burn::tensor::backend::AutodiffBackend;
use burn::tensor::ops::FloatTensor;
use burn_accum::{AccumConfig, Accumulation};
use burn_amp::{Bf16, F16, Off, autocast};
use burn_checkpoint::{MemoryBudget, apart};
use burn_decorator::module::for_each_float;
use burn_estimate::{Estimate, Meta, MetaDevice, estimate_rank};
use burn_ranks::{ProcessGroup, SimulatedRank};
use burn_zero::{
    BatchConfig, DeepSpeedConfig, DeepSpeedParts, HostAdamWConfig, Memory, ZeroConfig,
    offload_parameters,
};

use super::error::TrainingError;
use super::precision::{Amp, Training};
use super::recompute::Checkpoint;

/// Tokens of a sequence in a step without data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Length {
    /// As many as in the training.
    Whole,
    /// A few: the step only makes the optimizer's state, which is as large after any sequence.
    Short,
}

impl Length {
    /// The tokens of a sequence, of a training with sequences of `context` tokens.
    pub fn tokens(self, context: usize) -> usize {
        const FEW: usize = 8;
        match self {
            Self::Whole => context,
            Self::Short => context.min(FEW),
        }
    }
}

/// What is around a model in a training.
#[derive(Clone, Debug)]
pub struct Stack {
    /// Precision.
    pub amp: Amp,
    /// What becomes of activations until backward.
    pub checkpoint: Checkpoint,
    /// Stage, offload.
    pub zero: ZeroConfig,
    /// Ranks.
    pub ranks: usize,
    /// Micro-batches of an update.
    pub window: AccumConfig,
}

impl Stack {
    /// What the second update of rank 0 takes on a device. `backward` makes the gradients of a
    /// micro-batch with sequences of some length.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn estimate<M: AutodiffModule<Training<Meta>> + 'static>(
        &self,
        device: MetaDevice,
        model: impl FnOnce() -> Result<M, TrainingError>,
        backward: impl Fn(&M, Length) -> GradientsParams,
    ) -> Result<Estimate, TrainingError> {
        let run = || self.run(device, model, backward);
        // The thread's policy, whatever that of the process is.
        match self.amp {
            Amp::Off => autocast::<Off, _>(run),
            Amp::Bf16 => autocast::<Bf16, _>(run),
            Amp::F16 => autocast::<F16, _>(run),
        }
    }

    /// Bytes of host memory that AdamW on the host reads and writes for so many trained numbers: it
    /// reads gradient, master and moments, and writes all but the gradient.
    fn host_bytes(&self, trained: usize) -> u64 {
        if self.zero.offload_optimizer == Memory::Device {
            return 0;
        }
        let shards = match self.zero.stage.shards_optimizer_state() {
            true => self.ranks,
            false => 1,
        };
        (7 * size_of::<f32>() * trained / shards) as u64
    }

    /// The length of sequences in the first step. A budget evicts by the sizes in the step before.
    /// Parameters in host memory are uploaded in the order of the step before, and what
    /// [`Checkpoint::KeepCompute`] keeps, and so which parameters replays use, depends on the
    /// length.
    fn first_length(&self) -> Length {
        let is_on_host = self.zero.offload_param == Memory::Host;
        if self.checkpoint.budget().is_some()
            || (is_on_host && self.checkpoint == Checkpoint::KeepCompute)
        {
            Length::Whole
        } else {
            Length::Short
        }
    }

    /// The update, but for its windows' normalization.
    fn config(&self) -> DeepSpeedConfig {
        let batch = BatchConfig {
            train_batch_size: None,
            // What a micro-batch has in it is up to `backward`.
            train_micro_batch_size_per_gpu: Some(1),
            gradient_accumulation_steps: Some(self.window.steps as u64),
        };
        DeepSpeedConfig {
            zero: ZeroConfig {
                batch,
                ..self.zero.clone()
            },
            precision: self.amp.precision(),
            adamw: Some(HostAdamWConfig::default()),
            learning_rate: None,
        }
    }

    fn run<M: AutodiffModule<Training<Meta>> + 'static>(
        &self,
        device: MetaDevice,
        model: impl FnOnce() -> Result<M, TrainingError>,
        backward: impl Fn(&M, Length) -> GradientsParams,
    ) -> Result<Estimate, TrainingError> {
        type B = Training<Meta>;
        const STEPS: &str = "what is refused is refused before the first step";

        let simulated = Arc::new(SimulatedRank::new(0, self.ranks)?);
        let mut parts = DeepSpeedParts::new(&self.config(), simulated.clone())?;
        parts.windows = Accumulation::new(self.window)?;
        let mut update = parts.into_update()?;
        let model = match self.zero.offload_param {
            Memory::Device => model()?,
            Memory::Host => offload_parameters::<B, _>(model()?).expect("it has a `Remat`"),
        };
        let (model, _) = self.checkpoint.with_units::<B, _>(model)?;
        let model = update.prepare(model)?;
        let trained = trained_numbers::<B, M>(&model);
        let micro_batches = self.window.steps;
        let first = self.first_length();
        // As in a training: a budget does not count parameters. It is this plan's alone.
        let _apart = apart();
        let _budget = self.checkpoint.budget().map(MemoryBudget::install);
        // The step that the estimate does not count only makes the optimizer's state.
        let mut is_first = true;
        let step = |mut model| {
            let is_first = std::mem::take(&mut is_first);
            let (backwards, length) = if is_first {
                (1, first)
            } else {
                (micro_batches, Length::Whole)
            };
            for _ in 0..backwards {
                let gradients = backward(&model, length);
                device.backward_ended();
                model = update.step(1e-3, model, gradients).expect(STEPS);
            }
            if is_first && self.window.steps > 1 {
                model = update.flush(1e-3, model).expect(STEPS);
            }
            model
        };
        let sent = || simulated.traffic().of_tensors().data_bytes;
        let (mut estimate, _) = estimate_rank::<B, _>(device, sent, model, step);
        estimate.host_bytes += self.host_bytes(trained);
        Ok(estimate)
    }
}

/// The number of a model's trained numbers, tied ones once.
fn trained_numbers<B: AutodiffBackend, M: AutodiffModule<B>>(model: &M) -> usize {
    let mut numbers = BTreeMap::new();
    for_each_float(model, |_, id, tensor: FloatTensor<B>| {
        if B::float_is_require_grad(&tensor) {
            numbers.insert(id, tensor.shape().num_elements());
        }
    });
    numbers.values().sum()
}
