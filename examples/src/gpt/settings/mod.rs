//! The settings of a run: from the command line, and from the file in DeepSpeed's format that it may name.

mod sources;

use burn_zero::Memory;

use super::error::GptError;
use super::job::Job;
use super::options::Options;
use super::schedule::Schedule;
use sources::Sources;

/// All settings of a run over a known number of ranks.
///
/// The file has precedence. The command line fills in what the file leaves at its default, and may repeat the file; a
/// contradiction is an error.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The options, filled in.
    pub options: Options,
    /// The job: stage, batch sizes, precision, clipping, offload and optimizer.
    pub job: Job,
}

impl Settings {
    /// Puts the command line and its file together, for `world_size` ranks.
    ///
    /// # Errors
    ///
    /// [`GptError::Io`], [`GptError::Config`], [`GptError::Contradiction`], [`GptError::Options`].
    pub fn new(options: &Options, world_size: usize) -> Result<Self, GptError> {
        if let (Some(effective_batch), 2..) = (options.effective_batch, world_size) {
            return Err(GptError::Options(format!(
                "--effective-batch {effective_batch} is looked for on one rank, but there are {world_size}: give --batch and \
                 --accum"
            )));
        }
        let sources = Sources::read(options)?;
        let config = sources.merge()?;
        let batch = config.zero.batch.resolve(world_size);
        let batch = batch.map_err(|error| sources.error(error))?;
        let mut settings = Self {
            options: options.clone(),
            job: Job { config, batch },
        };
        settings.fill_in();
        Ok(settings)
    }

    /// Sequences in an update, over all ranks.
    pub fn sequences_per_update(&self) -> usize {
        self.job.batch.train as usize
    }

    /// Highest learning rate; a schedule of the file may name another.
    pub fn lr(&self) -> f64 {
        let optimizer = self.job.config.optimizer.as_ref();
        optimizer.expect("merged settings have one").lr()
    }

    /// The learning rate of each update: the file's schedule, or else a linear warm-up and a cosine.
    pub fn schedule(&self) -> Schedule {
        let options = &self.options;
        match self.job.config.scheduler {
            Some(scheduler) => Schedule::configured(scheduler, self.lr()),
            None => Schedule::warmup_cosine(self.lr(), options.warmup(), options.steps),
        }
    }

    /// Sets the window that was found.
    pub fn set_window(&mut self, micro_batch: usize, steps: usize) {
        let batch = &mut self.job.batch;
        (batch.micro, batch.steps) = (micro_batch as u64, steps as u64);
        self.fill_in();
    }

    /// Writes the final values into the options and into the batch sizes of the configuration.
    fn fill_in(&mut self) {
        let Job { config, batch } = &mut self.job;
        config.zero.batch.train_batch_size = Some(batch.train);
        config.zero.batch.train_micro_batch_size_per_gpu = Some(batch.micro);
        config.zero.batch.gradient_accumulation_steps = Some(batch.steps);
        let plan = self.options.plan();
        self.options = Options {
            amp: Some(config.amp),
            batch: Some(batch.micro as usize),
            accum: Some(batch.steps as usize),
            lr: config.optimizer.as_ref().map(|optimizer| optimizer.lr()),
            warmup: config.scheduler.is_none().then(|| self.options.warmup()),
            eval_every: Some(plan.longest()),
            zero: Some(config.zero.stage),
            ranks: Some(batch.world_size),
            offload: config.zero.offload_optimizer == Memory::Host,
            ..self.options.clone()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    use crate::gpt::optimizer::{OptimizerConfig, default_optimizer};
    use crate::gpt::options::Amp;
    use burn_amp::GradScalerConfig;
    use burn_zero::Stage;
    use clap::Parser;

    fn settle(file: &str, arguments: &str, world_size: usize) -> Result<Settings, String> {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ds_config.json");
        fs::write(&path, file).unwrap();
        let path = path.display().to_string();
        let arguments = ["gpt", "--config", &path]
            .into_iter()
            .chain(arguments.split_whitespace());
        Settings::new(&Options::parse_from(arguments), world_size)
            .map_err(|error| error.to_string().replace(&path, "FILE"))
    }

    #[test]
    fn without_a_file_the_options_count() {
        let settle = |arguments: &str, world_size| {
            let arguments = ["gpt"].into_iter().chain(arguments.split_whitespace());
            Settings::new(&Options::parse_from(arguments), world_size).unwrap()
        };
        let plain = settle("", 1);
        assert_eq!((plain.sequences_per_update(), plain.lr()), (16, 2e-3));
        assert_eq!(plain.job.config.zero.gradient_clipping, Some(1.0));
        assert_eq!(plain.options.warmup, Some(120));

        let given = settle(
            "--zero 2 --batch 4 --accum 3 --amp f16 --offload --lr 0.1",
            2,
        );
        assert_eq!(given.sequences_per_update(), 24);
        assert_eq!(given.job.config.zero.stage, Stage::Gradients);
        assert_eq!(given.job.config.zero.offload_optimizer, Memory::Host);
        assert_eq!((given.lr(), given.options.ranks), (0.1, Some(2)));
        // PyTorch's scaler, as burn-amp's.
        let config = &given.job.config;
        assert_eq!(
            (config.amp, &config.scaler),
            (Amp::F16, &GradScalerConfig::default())
        );
    }

    #[test]
    fn what_the_file_says_counts() {
        let file = r#"{"train_batch_size": 64, "gradient_accumulation_steps": 4, "fp16": {"enabled": true, "loss_scale": 128},
            "zero_optimization": {"stage": 1}, "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 7}}}"#;
        let settings = settle(file, "", 2).unwrap();
        let Options {
            amp,
            batch,
            accum,
            lr,
            warmup,
            zero,
            ..
        } = settings.options;
        assert_eq!((batch, accum, lr), (Some(8), Some(4), Some(0.5)));
        assert_eq!((amp, warmup), (Some(Amp::F16), None));
        assert_eq!(zero, Some(Stage::OptimizerState));
        let config = settings.job.config;
        assert_eq!(config.zero.gradient_clipping, Some(1.0));
        assert!(matches!(config.optimizer, Some(OptimizerConfig::Sgd(_))));
        assert_eq!(
            (config.amp, config.scaler),
            (Amp::F16, GradScalerConfig::fixed(128.0))
        );

        // The same once more is no contradiction, and what the file leaves open is filled in.
        settle(file, "--amp f16 --zero 1 --lr 0.5 --accum 4 --batch 8", 2).unwrap();
        let open = r#"{"train_batch_size": 64}"#;
        let filled = settle(open, "--batch 8 --zero 2 --amp bf16 --lr 0.25", 2).unwrap();
        assert_eq!(filled.options.accum, Some(4));
        assert_eq!(filled.job.config.zero.stage, Stage::Gradients);
        assert_eq!((filled.options.amp, filled.lr()), (Some(Amp::Bf16), 0.25));
        let neither = settle("{}", "", 3).unwrap();
        assert_eq!(neither.sequences_per_update(), 48);
    }

    #[test]
    fn the_options_and_the_model_fill_auto_in() {
        let file = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"},
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
            "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto",
            "warmup_num_steps": "auto", "total_num_steps": "auto"}}}"#;
        let options = "--amp bf16 --lr 0.5 --batch 2 --accum 3 --warmup 4 --steps 12 --width 32";
        let settings = settle(file, options, 2).unwrap();
        assert_eq!((settings.sequences_per_update(), settings.lr()), (12, 0.5));
        let config = &settings.job.config;
        assert_eq!(config.zero.gradient_clipping, Some(1.0));
        assert_eq!(config.amp, Amp::Bf16);
        assert_eq!(config.zero.reduce_bucket_size, 32 * 32);
        assert_eq!(config.optimizer, Some(default_optimizer(0.5)));
        let scheduler = config.scheduler.unwrap();
        assert_eq!((scheduler.warmup().steps, scheduler.lr(5, 9.0)), (4, 0.5));
        assert_eq!(scheduler.lr(13, 9.0), 0.0);

        // The defaults of the options fill it in as well.
        let settings = settle(file, "", 1).unwrap();
        assert_eq!((settings.sequences_per_update(), settings.lr()), (16, 2e-3));
        assert_eq!(settings.job.config.amp, Amp::Off);
        let scheduler = settings.job.config.scheduler.unwrap();
        assert_eq!(scheduler.warmup().steps, 120);
    }

    #[test]
    fn contradictions_name_both_sides() {
        for (file, arguments, says) in [
            (
                r#"{"zero_optimization": {"stage": 2}}"#,
                "--zero 1",
                "--zero 1, but FILE has zero_optimization.stage 2: leave one of them out",
            ),
            (
                r#"{"bf16": {"enabled": true}}"#,
                "--amp off",
                "--amp off, but FILE has a precision of bf16: leave one of them out",
            ),
            (
                r#"{"optimizer": {"type": "Adam", "params": {"lr": 1e-4}}}"#,
                "--lr 0.001",
                "--lr 0.001, but FILE has optimizer.params.lr 0.0001: leave one of them out",
            ),
            (
                r#"{"scheduler": {"type": "WarmupLR"}}"#,
                "--warmup 3",
                "--warmup 3, but FILE has a scheduler: leave one of them out",
            ),
            (
                r#"{"train_micro_batch_size_per_gpu": 4}"#,
                "--batch 8",
                "--batch 8, but FILE has train_micro_batch_size_per_gpu 4: leave one of them out",
            ),
            (
                "{}",
                "--effective-batch 32",
                "--effective-batch 32 is looked for on one rank, but there are 2: give --batch and --accum",
            ),
            (
                r#"{"train_batch_size": 64}"#,
                "--batch 5",
                "FILE with --batch 5: train_batch_size 64 is no multiple of 2 ranks x train_micro_batch_size_per_gpu 5 = 10",
            ),
            (
                r#"{"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4}"#,
                "",
                "FILE: train_batch_size 64, but train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 4 x 2 ranks = 32",
            ),
        ] {
            assert_eq!(settle(file, arguments, 2).unwrap_err(), says);
        }
    }

    #[test]
    fn an_effective_batch_is_not_in_the_file_too() {
        let error = settle(r#"{"train_batch_size": 64}"#, "--effective-batch 32", 1).unwrap_err();
        assert_eq!(
            error,
            "--effective-batch 32, but FILE has train_batch_size 64: leave one of them out"
        );
    }

    #[test]
    fn stage_3_is_refused_with_what_to_do() {
        let error = settle(r#"{"zero_optimization": {"stage": 3}}"#, "", 1).unwrap_err();
        assert_eq!(
            error,
            "FILE: zero_optimization.stage: 3 is not supported: sharded parameters come later; stage 2, with \
             offload_optimizer, is the one that needs least memory now"
        );
    }
}
