//! The command line and the file, put together.

use std::fmt::Display;
use std::fs;
use std::path::{Path, PathBuf};

use burn_zero::{ConfigError, Memory, Stage};

use crate::gpt::error::GptError;
use crate::gpt::job::{AutoValues, JobConfig};
use crate::gpt::optimizer::{default_optimizer, default_params};
use crate::gpt::options::{Amp, Options};

/// Sequences in a micro-batch by default.
const BATCH: u64 = 16;

/// Highest learning rate by default.
const LEARNING_RATE: f64 = 2e-3;

/// The command line and the file.
pub(super) struct Sources<'a> {
    options: &'a Options,
    /// Its path, and what is in it.
    file: Option<(PathBuf, JobConfig)>,
}

impl<'a> Sources<'a> {
    /// # Errors
    ///
    /// [`GptError::Io`], [`GptError::Config`].
    pub(super) fn read(options: &'a Options) -> Result<Self, GptError> {
        let read = |path: &PathBuf| {
            let text = fs::read_to_string(path).map_err(GptError::io("read", path))?;
            let config = JobConfig::read(&text, &auto_values(options));
            let config = config.map_err(|source| GptError::Config {
                place: path.display().to_string(),
                source,
            })?;
            Ok::<_, GptError>((path.clone(), config))
        };
        let file = options.config.as_ref().map(read).transpose()?;
        Ok(Self { options, file })
    }

    /// Merges both.
    ///
    /// # Errors
    ///
    /// [`GptError::Contradiction`].
    pub(super) fn merge(&self) -> Result<JobConfig, GptError> {
        let Options {
            amp,
            zero,
            offload,
            lr,
            warmup,
            ..
        } = *self.options;
        let file = self.file.as_ref();
        let mut config = file.map_or_else(JobConfig::default, |(_, config)| config.clone());

        let sharded =
            (config.zero.stage != Stage::DataParallel).then(|| config.zero.stage.number());
        let stage = self.either(
            ("--zero", zero.map(Stage::number)),
            ("zero_optimization.stage", sharded),
        )?;
        config.zero.stage = stage
            .and_then(|number| Stage::try_from(number).ok())
            .unwrap_or_default();

        let reduced = Some(config.amp).filter(|amp| *amp != Amp::Off);
        let amp = self.either(("--amp", amp), ("a precision of", reduced))?;
        if reduced.is_none() {
            config.amp = amp.unwrap_or(Amp::Off);
            config.scaler = config.amp.configs().1;
        }

        if offload {
            config.zero.offload_optimizer = Memory::Host;
        }

        let named = config.optimizer.as_ref().map(|optimizer| optimizer.lr());
        let lr = self.either(("--lr", lr), ("optimizer.params.lr", named))?;
        let optimizer = || default_optimizer(lr.unwrap_or(LEARNING_RATE));
        config.optimizer = Some(config.optimizer.unwrap_or_else(optimizer));
        if let (Some(warmup), Some(scheduler)) = (warmup, &config.scheduler)
            && scheduler.warmup().steps != warmup as u64
        {
            return Err(self.contradiction(format!("--warmup {warmup}"), "a scheduler".into()));
        }
        self.merge_batch(&mut config)?;
        Ok(config)
    }

    fn merge_batch(&self, config: &mut JobConfig) -> Result<(), GptError> {
        let Options {
            batch,
            accum,
            effective_batch,
            ..
        } = *self.options;
        let sizes = &mut config.zero.batch;
        if let Some(effective_batch) = effective_batch {
            let named = [
                ("train_batch_size", sizes.train_batch_size),
                (MICRO, sizes.train_micro_batch_size_per_gpu),
                (STEPS, sizes.gradient_accumulation_steps),
            ];
            if let Some((key, size)) = named.into_iter().find_map(|(key, size)| Some((key, size?)))
            {
                return Err(self.contradiction(
                    format!("--effective-batch {effective_batch}"),
                    format!("{key} {size}"),
                ));
            }
            // Until the micro-batch is found it is the whole effective batch.
            sizes.train_batch_size = Some(effective_batch as u64);
            return Ok(());
        }
        let given = |size: Option<usize>| size.map(|size| size as u64);
        sizes.train_micro_batch_size_per_gpu = self.either(
            ("--batch", given(batch)),
            (MICRO, sizes.train_micro_batch_size_per_gpu),
        )?;
        sizes.gradient_accumulation_steps = self.either(
            ("--accum", given(accum)),
            (STEPS, sizes.gradient_accumulation_steps),
        )?;
        if sizes.train_batch_size.is_none() {
            sizes.train_micro_batch_size_per_gpu.get_or_insert(BATCH);
        }
        Ok(())
    }

    /// The value of the command line or the file, or of both if they are the same.
    fn either<T: PartialEq + Display>(
        &self,
        (option, given): (&str, Option<T>),
        (key, named): (&str, Option<T>),
    ) -> Result<Option<T>, GptError> {
        match (given, named) {
            (Some(given), Some(named)) if given != named => {
                Err(self.contradiction(format!("{option} {given}"), format!("{key} {named}")))
            }
            (given, named) => Ok(given.or(named)),
        }
    }

    fn contradiction(&self, option: String, says: String) -> GptError {
        let path = self.file.as_ref().map_or(Path::new(""), |(path, _)| path);
        GptError::Contradiction {
            option,
            path: path.to_path_buf(),
            says,
        }
    }

    /// An error about numbers of which some may be options.
    pub(super) fn error(&self, source: ConfigError) -> GptError {
        let options = [
            ("--batch", self.options.batch),
            ("--accum", self.options.accum),
        ];
        let given: Vec<_> = options
            .into_iter()
            .filter_map(|(option, size)| Some(format!("{option} {}", size?)))
            .collect();
        let place = match &self.file {
            None => "the command line".to_owned(),
            Some((path, _)) if given.is_empty() => path.display().to_string(),
            Some((path, _)) => format!("{} with {}", path.display(), given.join(" ")),
        };
        GptError::Config { place, source }
    }
}

/// The values for the file's `"auto"`: from the options, their defaults where they are not given, and the model.
fn auto_values(options: &Options) -> AutoValues {
    AutoValues {
        amp: options.amp.unwrap_or(Amp::Off),
        adam: default_params(options.lr.unwrap_or(LEARNING_RATE)),
        warmup_steps: options.warmup() as u64,
        total_steps: options.steps as u64,
        hidden_size: options.width as u64,
    }
}

const MICRO: &str = "train_micro_batch_size_per_gpu";
const STEPS: &str = "gradient_accumulation_steps";
