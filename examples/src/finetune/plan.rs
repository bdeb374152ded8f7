//! Which settings fit into some memory: the update of the training itself, run without data.

use std::collections::BTreeSet;
use std::fmt;
use std::time::Duration;

use burn::tensor::{Int, Tensor};
use burn_accum::{AccumConfig, Counted};
use burn_estimate::{
    DeviceMemory, DeviceProfile, Estimate, LinkedMemory, Meta, MetaDevice, Plan, Planned, plan,
};
use burn_zero::{Memory, Stage, ZeroConfig};

use super::options::{Options, Packing};
use super::tuning::TuningOptions;
use crate::backend::BackendName;
use crate::llm::{Llm, LlmConfig, Sequences};
use crate::training::error::TrainingError;
use crate::training::options::MemoryOptions;
use crate::training::precision::{Amp, Training};
use crate::training::ranks::Rank;
use crate::training::recompute::Checkpoint;
use crate::training::without_data::Stack;

/// What changes the memory and the time of an update, and not what it computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Setting {
    /// Sequences in memory at once.
    pub batch: usize,
    /// Micro-batches of a rank in an update.
    pub accum: usize,
    /// Precision.
    pub amp: Amp,
    /// What becomes of activations until backward.
    pub checkpoint: Checkpoint,
    /// Ranks.
    pub ranks: usize,
    /// What is sharded over them.
    pub stage: Stage,
    /// Whether the optimizer's state is in host memory.
    pub offload: bool,
    /// Whether the parameters are in host memory.
    pub offload_param: bool,
}

impl Setting {
    /// That of some options.
    pub fn new(batch: usize, accum: usize, memory: &MemoryOptions) -> Self {
        Self {
            batch,
            accum,
            amp: memory.amp(),
            checkpoint: memory.checkpoint,
            ranks: memory.ranks.unwrap_or(1),
            stage: memory.zero(),
            offload: memory.offload,
            offload_param: memory.offload_param,
        }
    }

    /// Sets the options to it.
    fn set(&self, options: &mut Options) {
        (options.batch, options.accum) = (self.batch, self.accum);
        options.memory.checkpoint = self.checkpoint;
        options.memory.zero = Some(self.stage);
        options.memory.offload = self.offload;
        options.memory.offload_param = self.offload_param;
    }

    /// Whether something of the device is in host memory.
    fn uses_host(&self) -> bool {
        self.offload || self.offload_param || self.checkpoint == Checkpoint::Offload
    }

    /// Whether it is the other one but for a micro-batch that is no larger, so that it takes no more
    /// memory.
    fn takes_no_more_than(&self, other: &Self) -> bool {
        let but = |setting: &Self| Self {
            batch: 0,
            accum: 0,
            ..*setting
        };
        // Without accumulation there are no sums of gradients.
        let has_sums = other.accum > 1 || self.accum == 1;
        but(self) == but(other) && self.batch <= other.batch && has_sums
    }

    /// The settings of the same update, in the order in which more is recomputed, sharded and
    /// moved. What is asked for stays.
    fn others(&self) -> Vec<Self> {
        let effective = self.batch * self.accum;
        let micro = (0..usize::BITS).map(|power| 1 << power);
        let micro: BTreeSet<usize> = micro
            .take_while(|batch| *batch <= effective)
            .chain([self.batch, effective])
            .filter(|batch| effective.is_multiple_of(*batch))
            .collect();
        let checkpoints = match self.checkpoint {
            Checkpoint::None => vec![
                Checkpoint::None,
                Checkpoint::KeepCompute,
                Checkpoint::Block,
                Checkpoint::Offload,
            ],
            asked => vec![asked],
        };
        let stages: Vec<_> = Stage::ALL
            .into_iter()
            .filter(|stage| stage.number() >= self.stage.number())
            .filter(|stage| self.ranks > 1 || *stage == self.stage)
            .collect();
        // Parameters that are on the host are updated there.
        let places = [(false, false), (true, false), (true, true)];
        let mut settings = Vec::new();
        for checkpoint in checkpoints {
            for &stage in &stages {
                for (offload, offload_param) in places {
                    let leaves_out =
                        (self.offload && !offload) || (self.offload_param && !offload_param);
                    if leaves_out {
                        continue;
                    }
                    settings.extend(micro.iter().map(|&batch| Self {
                        batch,
                        accum: effective / batch,
                        checkpoint,
                        stage,
                        offload,
                        offload_param,
                        ..*self
                    }));
                }
            }
        }
        settings
    }

    fn zero(&self) -> ZeroConfig {
        let place = |is_on_host| {
            if is_on_host {
                Memory::Host
            } else {
                Memory::Device
            }
        };
        ZeroConfig {
            stage: self.stage,
            gradient_clipping: Some(1.0),
            offload_optimizer: place(self.offload),
            offload_param: place(self.offload_param),
            ..ZeroConfig::default()
        }
    }
}

/// As on the command line.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            batch,
            accum,
            amp,
            checkpoint,
            ..
        } = self;
        write!(
            f,
            "--batch {batch} --accum {accum} --amp {amp} --checkpoint {checkpoint}"
        )?;
        if self.ranks > 1 {
            write!(f, " --ranks {} --zero {}", self.ranks, self.stage.number())?;
        }
        if self.offload {
            f.write_str(" --offload")?;
        }
        if self.offload_param {
            f.write_str(" --offload-param")?;
        }
        Ok(())
    }
}

/// The updates of one model on one device.
#[derive(Clone, Debug)]
pub struct Planner<'a> {
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
    /// Its speed.
    pub profile: DeviceProfile,
    /// Its memory.
    pub memory: DeviceMemory,
}

impl Planner<'_> {
    /// What an update takes: its peak and its time.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn planned(&self, setting: Setting) -> Result<Planned<Setting>, TrainingError> {
        let (estimate, time) = self.estimate(setting)?;
        Ok(Planned {
            setting,
            needed_bytes: self.memory.needed(&estimate),
            estimate,
            time,
        })
    }

    /// The settings of the same update, by whether they fit.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn plan(&self, asked: Setting) -> Result<Plan<Setting>, TrainingError> {
        let mut settings = asked.others();
        if self.profile.link.memory == LinkedMemory::Shared {
            settings.retain(|setting| !setting.uses_host() || asked.uses_host());
        }
        let mut failed = None;
        let plan = plan(settings, self.memory, |setting, too_large| {
            let mut smaller = too_large.iter();
            if failed.is_some()
                || smaller.any(|planned| planned.setting.takes_no_more_than(setting))
            {
                return None;
            }
            match self.estimate(*setting) {
                Ok(found) => Some(found),
                Err(error) => {
                    failed = Some(error);
                    None
                }
            }
        });
        failed.map_or(Ok(plan), Err)
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

    fn estimate(&self, setting: Setting) -> Result<(Estimate, Duration), TrainingError> {
        type B = Training<Meta>;
        let device = self.meta;
        // Windows of more micro-batches hold what those of two hold.
        let window = setting.accum.min(2);
        let stack = Stack {
            amp: setting.amp,
            checkpoint: setting.checkpoint,
            zero: setting.zero(),
            ranks: setting.ranks,
            window: AccumConfig::tokens(window),
        };
        let boundaries = if self.has_documents {
            vec![self.context / 2]
        } else {
            Vec::new()
        };
        let model = || {
            let model = self.tuning.tuned(self.config.init::<B>(&device))?;
            Ok(model.with_checkpoint(setting.checkpoint))
        };
        let backward = |model: &Llm<B>| {
            let shape = [setting.batch, self.context];
            let sequences = Sequences {
                tokens: Tensor::<B, 2, Int>::zeros(shape, &device),
                boundaries: vec![boundaries.clone(); setting.batch],
                counted: None,
            };
            let output = model.loss(&sequences);
            Counted::mean(output.loss, output.items).backward(model)
        };
        let trained = self.trained_parameters()?;
        let estimate = stack.estimate(device, trained, model, backward)?;
        let more = setting.accum - window;
        let time = estimate.time_with_more(&self.profile, more as u32);
        Ok((estimate, time))
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
    let settings = asked.others();
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
    settings[places[0] as usize].set(&mut agreed);
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
    let planner = Planner {
        config,
        tuning: &options.tuning.without_files(config)?,
        context: options.context,
        has_documents: options.packing() == Packing::Documents,
        meta: backend.meta(),
        profile,
        memory,
    };
    let plan = planner.plan(asked)?;
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
