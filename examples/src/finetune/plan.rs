//! The update of the training, run without data, and the settings of it that fit into some memory.

use std::sync::OnceLock;

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

/// Two models that differ from a deep one in the number of blocks.
struct FewBlocks {
    fewer: LlmConfig,
    /// With one block more.
    few: LlmConfig,
    /// The blocks that the deep one has more.
    more: usize,
}

impl<'a> Updates<'a> {
    /// Looks for settings that fit into a device's memory.
    pub fn planner(self, profile: DeviceProfile, memory: DeviceMemory) -> Planner<'a> {
        let (meta, few_blocks) = (self.meta, OnceLock::new());
        Planner::new(profile, memory, meta, move |setting, meta| {
            let updates = Self {
                meta,
                ..self.clone()
            };
            let few_blocks = match few_blocks.get() {
                Some(known) => known,
                None => {
                    let found = updates.few_blocks()?;
                    few_blocks.get_or_init(|| found)
                }
            };
            updates.estimate(setting, few_blocks.as_ref())
        })
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

    /// The two models with few blocks that tell what this one takes. `None` if it has few itself, or
    /// if what is trained depends on the number of a block.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    fn few_blocks(&self) -> Result<Option<FewBlocks>, TrainingError> {
        // In each pass of a recomputed step up to five blocks differ: the first ones and the last
        // ones. Three have to be alike.
        const FEW: usize = 8;
        if self.config.layers <= 2 * FEW {
            return Ok(None);
        }
        let with_layers = |layers| LlmConfig {
            layers,
            ..self.config.clone()
        };
        let models = FewBlocks {
            fewer: with_layers(FEW - 1),
            few: with_layers(FEW),
            more: self.config.layers - FEW,
        };
        let trained = |config| self.of(config).trained_parameters();
        let few = trained(&models.few)?;
        let of_a_block = few - trained(&models.fewer)?;
        let is_alike = trained(self.config)? == few + models.more * of_a_block;
        Ok(is_alike.then_some(models))
    }

    fn of<'b>(&'b self, config: &'b LlmConfig) -> Updates<'b> {
        Updates {
            config,
            ..self.clone()
        }
    }

    /// What an update takes, with its whole stack: by few blocks if they tell.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    fn estimate(
        &self,
        setting: &Setting,
        few_blocks: Option<&FewBlocks>,
    ) -> Result<Estimate, TrainingError> {
        let told = match few_blocks {
            Some(models) => self.by_few_blocks(setting, models)?,
            None => None,
        };
        told.map_or_else(|| self.run(setting), Ok)
    }

    /// `None` if the blocks are not alike, or under a budget, which evicts by the bytes of all
    /// blocks.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    fn by_few_blocks(
        &self,
        setting: &Setting,
        models: &FewBlocks,
    ) -> Result<Option<Estimate>, TrainingError> {
        if setting.checkpoint.budget().is_some() {
            return Ok(None);
        }
        let run = |config| self.of(config).run(setting);
        let (fewer, few) = (run(&models.fewer)?, run(&models.few)?);
        Ok(few.with_more_blocks(&fewer, models.more))
    }

    /// Runs the update of the whole model.
    ///
    /// # Errors
    ///
    /// What the training would refuse too.
    pub fn run(&self, setting: &Setting) -> Result<Estimate, TrainingError> {
        self.run_after(setting, |length| length)
    }

    /// The update after a first step with sequences of another length.
    fn run_after(
        &self,
        setting: &Setting,
        length_of: impl Fn(Length) -> Length,
    ) -> Result<Estimate, TrainingError> {
        type B = Training<Meta>;
        let device = self.meta;
        let model = || {
            let model = self.tuning.tuned(self.config.init::<B>(&device))?;
            Ok(model.with_checkpoint(setting.checkpoint))
        };
        let backward = |model: &Llm<B>, length: Length| {
            let tokens = length_of(length).tokens(self.context);
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
        stack.estimate(device, model, backward)
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use burn_estimate::CubePools;
    use clap::Parser;

    use super::*;
    use crate::training::options::MemoryOptions;
    use crate::training::precision::Amp;

    #[derive(Parser)]
    struct Asked {
        #[command(flatten)]
        tuning: TuningOptions,
        #[command(flatten)]
        memory: MemoryOptions,
    }

    /// Every run of a plan, for full training and for adapters, with attention of many blocks of
    /// queries.
    #[test]
    fn an_update_takes_the_same_after_a_short_first_step() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/llm/qwen3/config.json");
        let config = LlmConfig::read_file(&file).unwrap();
        for options in ["", "--amp bf16", "--lora-rank 2 --amp bf16 --frozen bf16"] {
            let arguments = ["plan"].into_iter().chain(options.split_whitespace());
            let asked = Asked::parse_from(arguments);
            let updates = Updates {
                config: &config,
                tuning: &asked.tuning.without_files(&config).unwrap(),
                context: 512,
                has_documents: true,
                meta: MetaDevice::cuda(78),
            };
            let asked = Setting::new(1, 2, &asked.memory);
            let settings = asked.others(&[asked.amp]).into_iter();
            let settings = settings.filter(|setting| setting.batch == 1);
            let settings: Vec<_> = settings.collect();
            assert_eq!(settings.len(), 4 * 2 * 2);
            for setting in settings {
                let taken = |length_of: fn(Length) -> Length| {
                    let estimate = updates.run_after(&setting, length_of).unwrap();
                    let moved = [estimate.uploaded_bytes, estimate.downloaded_bytes];
                    let done = [estimate.operations, estimate.flops];
                    (moved, done, estimate.bytes_in_use)
                };
                let after_whole = taken(|_| Length::Whole);
                assert!(
                    taken(|length| length) == after_whole,
                    "{options}: {setting}"
                );
            }
        }
    }

    /// Every run of a plan, for full training and for adapters, of a model with 20 blocks.
    #[test]
    fn an_update_of_few_blocks_tells_what_that_of_the_whole_model_takes() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/llm/qwen3/config.json");
        let config = LlmConfig {
            layers: 20,
            ..LlmConfig::read_file(&file).unwrap()
        };
        let mut failed = Vec::new();
        let adapters = "--lora-rank 2 --amp bf16 --frozen bf16";
        for (options, accum, context) in [
            ("", 1, 16),
            ("--amp bf16", 2, 16),
            (adapters, 1, 16),
            (adapters, 2, 16),
            // At this length casts of a block are freed in the one before.
            (adapters, 1, 64),
            (adapters, 2, 64),
        ] {
            let arguments = ["plan"].into_iter().chain(options.split_whitespace());
            let asked = Asked::parse_from(arguments);
            let updates = Updates {
                config: &config,
                tuning: &asked.tuning.without_files(&config).unwrap(),
                context,
                has_documents: true,
                meta: MetaDevice::cuda(77),
            };
            let asked = Setting::new(1, accum, &asked.memory);
            let settings = asked.others(&[asked.amp]).into_iter();
            let settings = settings.filter(|setting| setting.batch == 1);
            let mut runs: Vec<Setting> = Vec::new();
            for setting in settings {
                let run = setting.run();
                if !runs.contains(&run) {
                    runs.push(run);
                }
            }
            assert_eq!(runs.len(), if asked.amp == Amp::Off { 5 } else { 12 });
            let models = updates.few_blocks().unwrap().expect("20 blocks are many");
            for setting in runs {
                let Some(few) = updates.by_few_blocks(&setting, &models).unwrap() else {
                    failed.push(format!("{options}: {setting}: its blocks are not alike"));
                    continue;
                };
                let whole = updates.run(&setting).unwrap();
                let taken = |estimate: &Estimate| {
                    [
                        estimate.peak_bytes,
                        estimate.start_bytes,
                        estimate.reserved_bytes(&CubePools::cuda(1 << 30)).unwrap(),
                        estimate.uploaded_bytes,
                        estimate.downloaded_bytes,
                        estimate.host_bytes,
                        estimate.operations,
                        estimate.replayed_operations,
                        estimate.time(&DeviceProfile::RTX_4090).as_nanos() as u64,
                    ]
                };
                let (few, whole) = (taken(&few), taken(&whole));
                println!("{options}: {setting}: {few:?}, {whole:?} of a run");
                let is_near =
                    |(few, whole): (&u64, &u64)| few.abs_diff(*whole) <= whole / 100 + 1024;
                if !few.iter().zip(&whole).all(is_near) {
                    failed.push(format!("{options}: {setting}: {few:?}, {whole:?} of a run"));
                }
            }
        }
        assert!(failed.is_empty(), "{}", failed.join("\n"));
    }
}
