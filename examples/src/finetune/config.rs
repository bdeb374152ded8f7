//! The options with what a DeepSpeed file says where the command line says nothing.

use std::ffi::OsString;

use burn_zero::{BatchConfig, DeepSpeedConfig, HostAdamWConfig, Memory};
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches};

use super::options::Options;
use crate::llm::LlmConfig;
use crate::training::deepspeed::{Auto, refused};
use crate::training::error::TrainingError;
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
        let batch = BatchConfig {
            train_micro_batch_size_per_gpu: (!is_default("batch"))
                .then_some(self.batch as u64)
                .or(file.zero.batch.train_micro_batch_size_per_gpu)
                .or(file
                    .zero
                    .batch
                    .train_batch_size
                    .is_none()
                    .then_some(self.batch as u64)),
            gradient_accumulation_steps: (!is_default("accum"))
                .then_some(self.accum as u64)
                .or(file.zero.batch.gradient_accumulation_steps),
            ..file.zero.batch
        };
        let ranks = number_of_ranks(self.memory.ranks, "finetune")?;
        let sizes = batch.resolve(ranks);
        let sizes = sizes.map_err(|error| refused(Some(&path), &error))?;
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
        let memory = &mut self.memory;
        memory.amp = memory.amp.or(Some(Amp::of(&file.precision)));
        memory.zero = memory.zero.or(Some(file.zero.stage));
        memory.offload |= file.zero.offload_optimizer == Memory::Host;
        memory.offload_param |= file.zero.offload_param == Memory::Host;
        self.file = Some(file);
        Ok(())
    }

    fn take_optimizer(&mut self, file: &DeepSpeedConfig, is_default: impl Fn(&str) -> bool) {
        let set = |name: &str, option: &mut f64, value: Option<f64>| {
            if let Some(value) = value.filter(|_| is_default(name)) {
                *option = value;
            }
        };
        let adamw = file.adamw.as_ref();
        set("lr", &mut self.lr, file.learning_rate);
        set("beta_1", &mut self.beta_1, adamw.map(|it| it.beta_1));
        set("beta_2", &mut self.beta_2, adamw.map(|it| it.beta_2));
        set("epsilon", &mut self.epsilon, adamw.map(|it| it.epsilon));
        let decay = adamw.map(|it| it.weight_decay);
        set("weight_decay", &mut self.weight_decay, decay);
    }
}
