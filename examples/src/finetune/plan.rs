//! The update of the training, run without data, and the settings of it that fit into some memory.

use burn::tensor::{Int, Tensor};
use burn_accum::{Counted, Normalization};
use burn_estimate::{DeviceMemory, DeviceProfile, Estimate, LinkedMemory, Meta, MetaDevice};

use super::options::{Options, Packing};
use super::tuning::TuningOptions;
use crate::backend::BackendName;
use crate::llm::{Llm, LlmConfig, Sequences};
use crate::training::error::TrainingError;
use crate::training::plan::{Planner, Setting};
use crate::training::precision::Training;
use crate::training::ranks::Rank;
use crate::training::without_data::Length;

/// The updates of one model.
#[derive(Clone, Debug)]
pub struct Updates<'a> {
    /// The model.
    pub config: &'a LlmConfig,
    /// What is trained of it.
    pub tuning: &'a TuningOptions,
    /// Tokens of a sequence.
    pub context: usize,
    /// Whether sequences have several documents, which attention keeps apart.
    pub has_documents: bool,
    /// The device without data.
    pub meta: MetaDevice,
}

impl<'a> Updates<'a> {
    /// Looks for settings that fit into a device's memory.
    pub fn planner(self, profile: DeviceProfile, memory: DeviceMemory) -> Planner<'a> {
        Planner::new(profile, memory, move |setting| self.estimate(setting))
    }

    /// The number of trained numbers.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn trained_parameters(&self) -> Result<usize, TrainingError> {
        let model = self.config.init::<Training<Meta>>(&self.meta);
        Ok(self.tuning.tuned(model)?.trained_parameters())
    }

    /// What an update takes, with its whole stack.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn estimate(&self, setting: &Setting) -> Result<Estimate, TrainingError> {
        type B = Training<Meta>;
        let device = self.meta;
        let model = || {
            let model = self.tuning.tuned(self.config.init::<B>(&device))?;
            Ok(model.with_checkpoint(setting.checkpoint))
        };
        let backward = |model: &Llm<B>, length: Length| {
            let tokens = length.tokens(self.context);
            let shape = [setting.batch, tokens];
            let boundaries = if self.has_documents {
                vec![tokens / 2]
            } else {
                Vec::new()
            };
            let sequences = Sequences {
                tokens: Tensor::<B, 2, Int>::zeros(shape, &device),
                boundaries: vec![boundaries; setting.batch],
                counted: None,
            };
            let output = model.loss(&sequences);
            Counted::mean(output.loss, output.items).backward(model)
        };
        let stack = setting.stack(Normalization::Tokens, Some(1.0));
        stack.estimate(device, self.trained_parameters()?, model, backward)
    }
}

/// The options with the fastest settings that fit into `--memory`, as rank 0 finds them, and prints:
/// the speed of a device is measured, so ranks that are processes would choose differently. Without
/// `--memory` the options as they are. All ranks call it; `profile` measures the device.
///
/// # Errors
///
/// [`TrainingError::Options`] if nothing fits: with the setting that needs the least, and what holds
/// its memory. What the training would refuse too.
pub fn agreed(
    options: &Options,
    config: &LlmConfig,
    rank: &Rank,
    profile: impl Fn() -> DeviceProfile,
) -> Result<Options, TrainingError> {
    let mut agreed = options.clone();
    let Some(bytes) = options.memory_bytes else {
        return Ok(agreed);
    };
    let asked = Setting {
        ranks: rank.world_size(),
        ..Setting::new(options.batch, options.accum, &options.memory)
    };
    // The same list on all ranks.
    let settings = asked.others(&[asked.amp]);
    let place = if rank.rank() == 0 {
        let best = fastest(options, config, asked, bytes, profile())?;
        let is_best = |setting: &Setting| *setting == best;
        settings
            .iter()
            .position(is_best)
            .expect("one of the settings")
    } else {
        0
    };
    let places = rank.gather_f64("setting of --memory", place as f64)?;
    let chosen = settings[places[0] as usize];
    (agreed.batch, agreed.accum) = (chosen.batch, chosen.accum);
    chosen.set(&mut agreed.memory);
    Ok(agreed)
}

/// The fastest setting that fits into so many bytes.
fn fastest(
    options: &Options,
    config: &LlmConfig,
    asked: Setting,
    bytes: u64,
    profile: DeviceProfile,
) -> Result<Setting, TrainingError> {
    let backend = options.memory.backend;
    let memory = match profile.link.memory {
        // Ranks that are threads compute in one memory.
        LinkedMemory::Shared => DeviceMemory::heap(bytes / asked.ranks as u64),
        LinkedMemory::Separate if backend == BackendName::Cuda => DeviceMemory::cuda(bytes),
        LinkedMemory::Separate => DeviceMemory::heap(bytes),
    };
    let updates = Updates {
        config,
        tuning: &options.tuning.without_files(config)?,
        context: options.context,
        has_documents: options.packing() == Packing::Documents,
        meta: backend.meta(),
    };
    let plan = updates.planner(profile, memory).plan(asked, &[asked.amp])?;
    let gib = |bytes: u64| bytes as f64 / f64::from(1 << 30);
    let Some(best) = plan.fitting.first() else {
        let least = plan
            .too_large
            .first()
            .expect("the setting that is asked for");
        return Err(TrainingError::Options(format!(
            "--memory: nothing fits into {:.2} GiB a rank; the least, {:.2} GiB, takes\n    {}\n{}\ngive a shorter --context, --lora-rank, \
             or --frozen bf16 with --amp bf16",
            gib(memory.bytes),
            gib(least.needed_bytes),
            least.setting,
            least.estimate
        )));
    };
    println!(
        "--memory: {} takes {:.2} of {:.2} GiB a rank, and about {:.1} s an update",
        best.setting,
        gib(best.needed_bytes),
        gib(memory.bytes),
        best.time.as_secs_f64()
    );
    Ok(best.setting)
}
