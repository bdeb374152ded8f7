//! The options with what a DeepSpeed file says where the command line says nothing.

use std::ffi::OsString;

use burn_zero::{BatchConfig, DeepSpeedConfig, HostAdamWConfig, Memory};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::options::Options;
use crate::llm::LlmConfig;
use crate::training::deepspeed::{Auto, refused};
use crate::training::error::TrainingError;
use crate::training::options::checked_learning_rate;
use crate::training::precision::Amp;
use crate::training::ranks::number_of_ranks;

const SCHEDULE: &str = "this program has a schedule: leave the section out, and see --schedule";

impl Options {
    /// Reads the command line, and the file that it may name: what the command line says counts,
    /// then the file, then the defaults. Ends the program where the command line is wrong.
    ///
    /// # Errors
    ///
    /// [`TrainingError::Io`]; [`TrainingError::Options`] for a file that cannot be, with the key.
    pub fn read<A: Into<OsString> + Clone>(
        arguments: impl IntoIterator<Item = A>,
    ) -> Result<Self, TrainingError> {
        let given = Self::command().get_matches_from(arguments);
        let mut options = Self::from_arg_matches(&given).unwrap_or_else(|error| error.exit());
        options.take_file(&given)?;
        Ok(options)
    }

    /// AdamW's numbers.
    pub fn adamw(&self) -> HostAdamWConfig {
        HostAdamWConfig {
            beta_1: self.beta_1,
            beta_2: self.beta_2,
            epsilon: self.epsilon,
            weight_decay: self.weight_decay,
        }
    }

    fn take_file(&mut self, given: &ArgMatches) -> Result<(), TrainingError> {
        let Some(path) = self.config.clone() else {
            return Ok(());
        };
        let auto = Auto {
            amp: self.memory.amp,
            lr: self.lr,
            adamw: self.adamw(),
            width: LlmConfig::read(&self.model)?.width,
        };
        let file = auto.read(Some(&path), SCHEDULE)?;
        let is_default = |name: &str| given.value_source(name) != Some(ValueSource::CommandLine);
        let batch = self.batches(&file.zero.batch, !is_default("batch"), !is_default("accum"));
        let ranks = number_of_ranks(self.memory.ranks, "finetune")?;
        let sizes = batch
            .resolve(ranks)
            .map_err(|error| refused(Some(&path), &error))?;
        (self.batch, self.accum) = (sizes.micro as usize, sizes.steps as usize);
        if is_default("clip") {
            self.clip = file.zero.gradient_clipping.ok_or_else(|| {
                let place = path.display();
                TrainingError::Options(format!(
                    "{place}: gradient_clipping: this program clips in every update: give a norm, 1e9 for one that does nothing"
                ))
            })?;
        }
        self.take_optimizer(&file, is_default);
        self.lr = checked_learning_rate(self.lr).map_err(|must| {
            let (place, lr) = (path.display(), self.lr);
            TrainingError::Options(format!("{place}: optimizer.params.lr: {lr} {must}"))
        })?;
        let memory = &mut self.memory;
        memory.amp = memory.amp.or(Some(Amp::of(&file.precision)));
        memory.zero = memory.zero.or(Some(file.zero.stage));
        memory.offload |= file.zero.offload_optimizer == Memory::Host;
        // Where the command line puts shards on the device, the file's place does not count.
        memory.offload_param |= file.zero.offload_param == Memory::Host && !memory.shards_on_device;
        memory.shards_on_device |= !memory.offload_param && file.zero.shards == Memory::Device;
        self.file = Some(file);
        Ok(())
    }

    /// The sizes of the command line and the file. With one of them on the command line an update
    /// keeps the file's size, if it names one, so the file's other one is left out; with both the
    /// update's is.
    fn batches(&self, file: &BatchConfig, has_batch: bool, has_accum: bool) -> BatchConfig {
        let has_size = file.train_batch_size.is_some();
        let micro = file.train_micro_batch_size_per_gpu;
        let steps = file.gradient_accumulation_steps;
        let of_file = BatchConfig {
            train_batch_size: file.train_batch_size.filter(|_| !(has_batch && has_accum)),
            train_micro_batch_size_per_gpu: micro.filter(|_| !(has_accum && has_size)),
            gradient_accumulation_steps: steps.filter(|_| !(has_batch && has_size)),
        };
        let (batch, accum) = (self.batch as u64, self.accum as u64);
        BatchConfig {
            train_micro_batch_size_per_gpu: if has_batch {
                Some(batch)
            } else {
                of_file
                    .train_micro_batch_size_per_gpu
                    .or((!has_size).then_some(batch))
            },
            gradient_accumulation_steps: has_accum
                .then_some(accum)
                .or(of_file.gradient_accumulation_steps),
            ..of_file
        }
    }

    /// The numbers that the file says.
    fn take_optimizer(&mut self, file: &DeepSpeedConfig, is_default: impl Fn(&str) -> bool) {
        let section = file.zero.sections.get("optimizer");
        let numbers = section.and_then(|section| section.get("params"));
        let says = |key: &str| numbers.is_some_and(|numbers| numbers.get(key).is_some());
        let Some(adamw) = &file.adamw else { return };
        let lr = file.learning_rate.unwrap_or(self.lr);
        for (name, key, option, value) in [
            ("lr", "lr", &mut self.lr, lr),
            ("beta_1", "betas", &mut self.beta_1, adamw.beta_1),
            ("beta_2", "betas", &mut self.beta_2, adamw.beta_2),
            ("epsilon", "eps", &mut self.epsilon, adamw.epsilon),
            (
                "weight_decay",
                "weight_decay",
                &mut self.weight_decay,
                adamw.weight_decay,
            ),
        ] {
            if says(key) && is_default(name) {
                *option = value;
            }
        }
    }
}
