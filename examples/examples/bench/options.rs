//! The command line.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{ArgAction, Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use super::error::BenchError;
use super::setting::Setting;
use examples::backend::BackendName;
use examples::gpt::model::GptConfig;
use examples::training::options::{mebibytes, positive, probability};
use examples::training::recompute::Checkpoint;

/// Times whole training steps of the GPT in different settings, side by side: every round takes one
/// step of each.
///
/// Without options it compares the bare backend, burn-amp switched off, bf16 and f16 for about a
/// minute on two cores.
///
/// A setting is a stack (bare, balanced, off, bf16, f16), what becomes of
/// activations in the stack off (block, keep-compute, offload, budget=MIB, budget=40%), or both:
/// bf16+block.
#[derive(Parser, Clone, Debug, PartialEq)]
#[command(name = "bench", version, args_override_self = true)]
pub struct Options {
    /// What to compare; ratios are to the first. One named twice shows the noise
    #[arg(
        long,
        action = ArgAction::Set,
        value_delimiter = ',',
        default_value = "bare,off,bf16,f16"
    )]
    pub settings: Vec<Setting>,

    /// Rounds that are timed [default: as the preset says]
    #[arg(long, value_name = "ROUNDS", value_parser = positive())]
    pub steps: Option<usize>,

    /// Rounds before them, in which kernels are compiled and chosen [default: as the preset says]
    #[arg(long, value_name = "ROUNDS", value_parser = positive())]
    pub warmup: Option<usize>,

    /// No further round after this time, once three are timed; with --fit, no further setting
    #[arg(long, value_name = "SECONDS", value_parser = positive())]
    pub max_seconds: Option<usize>,

    /// Where to compute; cuda, tch and vulkan are features of this package
    #[arg(long, value_enum, default_value_t = BackendName::Flex)]
    pub backend: BackendName,

    /// PyTorch beside it: examples/bench/torch_gpt.py, for which python3 takes steps of the same
    /// settings in the same rounds, from the same weights
    #[arg(long, value_name = "SCRIPT", conflicts_with_all = ["memory", "fit"])]
    pub torch: Option<PathBuf>,

    /// Seed of the weights and the tokens
    #[arg(long, default_value_t = 42)]
    pub seed: u64,

    /// Model, batch and rounds, where the options below and above do not say otherwise
    #[arg(long, value_enum, default_value_t = Preset::Small, help_heading = "Model")]
    pub preset: Preset,

    /// Transformer blocks
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub layers: Option<usize>,

    /// Attention heads of a block; they divide the width
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub heads: Option<usize>,

    /// Features of a token
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub width: Option<usize>,

    /// Tokens that the model sees at once
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub context: Option<usize>,

    /// Sequences in a batch
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub batch: Option<usize>,

    /// Number of different tokens
    #[arg(long, value_parser = positive(), help_heading = "Model")]
    pub vocabulary: Option<usize>,

    /// Probability that a feature is dropped. The draws of two frameworks differ, and so do their
    /// losses
    #[arg(long, default_value_t = 0.0, value_parser = probability, help_heading = "Model")]
    pub dropout: f64,

    /// Run each setting alone in a process of its own, so that memory can be told apart
    #[arg(long, help_heading = "Results")]
    pub memory: bool,

    /// Compare nothing; tell where the time of a step goes, by operation of the backend
    #[arg(long, conflicts_with_all = ["memory", "fit", "output", "plot", "torch"], help_heading = "Results")]
    pub operations: bool,

    /// Time nothing; find the largest batch with which a step of each setting holds less than this,
    /// parameters and all
    #[arg(
        long,
        value_name = "MIB",
        value_parser = mebibytes(),
        conflicts_with_all = ["memory", "batch"],
        help_heading = "Results"
    )]
    pub fit: Option<u64>,

    /// Write the results as JSON
    #[arg(long, value_name = "FILE", help_heading = "Results")]
    pub output: Option<PathBuf>,

    /// Draw the times as an SVG bar chart
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with = "fit",
        help_heading = "Results"
    )]
    pub plot: Option<PathBuf>,

    /// Measure nothing; make one table of JSON results, of this benchmark and of torch_gpt.py. What
    /// is in two files is taken from the first
    #[arg(
        long,
        value_name = "FILE",
        num_args = 1..,
        conflicts_with_all = ["memory", "fit", "output", "plot"],
        help_heading = "Results"
    )]
    pub compare: Vec<PathBuf>,
}

/// What `--preset` chooses from.
#[derive(ValueEnum, Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preset {
    /// 3 layers of width 128 over bytes, as the gpt example's default: for two cores
    Small,
    /// 12 layers of width 768 over 50304 tokens, context 1024: GPT-2's 124 M parameters, and 39 M
    /// more as the head is not tied to the embedding; for a GPU
    #[value(name = "gpt2")]
    Gpt2,
}

/// What a step works on.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Workload {
    /// Transformer blocks.
    pub layers: usize,
    /// Attention heads of a block.
    pub heads: usize,
    /// Features of a token.
    pub width: usize,
    /// Tokens of a sequence.
    pub context: usize,
    /// Sequences of a batch.
    pub batch: usize,
    /// Number of different tokens.
    pub vocabulary: usize,
    /// Probability that a feature is dropped.
    #[serde(default)]
    pub dropout: f64,
}

impl Preset {
    fn workload(self) -> Workload {
        match self {
            Self::Small => Workload {
                layers: 3,
                heads: 2,
                width: 128,
                context: 64,
                batch: 16,
                vocabulary: 256,
                dropout: 0.0,
            },
            Self::Gpt2 => Workload {
                layers: 12,
                heads: 12,
                width: 768,
                context: 1024,
                batch: 8,
                vocabulary: 50_304,
                dropout: 0.0,
            },
        }
    }

    fn steps(self) -> usize {
        match self {
            Self::Small => 50,
            Self::Gpt2 => 30,
        }
    }

    fn warmup(self) -> usize {
        match self {
            Self::Small => 5,
            Self::Gpt2 => 3,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Small => "small",
            Self::Gpt2 => "gpt2",
        }
    }
}

impl Workload {
    /// The model.
    pub fn model(&self) -> GptConfig {
        GptConfig::new(self.context, self.layers, self.heads, self.width)
            .with_vocabulary(self.vocabulary)
            .with_dropout(self.dropout)
    }

    /// Tokens that a step trains on.
    pub fn tokens(&self) -> usize {
        self.batch * self.context
    }
}

impl Options {
    /// Finds options that contradict each other, which clap cannot see.
    ///
    /// # Errors
    ///
    /// [`BenchError::Options`], with the values and what would be right.
    pub fn validate(&self) -> Result<(), BenchError> {
        let Workload { heads, width, .. } = self.workload();
        if !width.is_multiple_of(heads) {
            return Err(BenchError::Options(format!(
                "--heads {heads} does not divide --width {width}; the nearest width that it divides is {}",
                width.next_multiple_of(heads)
            )));
        }
        let layers = self.workload().layers;
        let refused = |setting: &Setting| setting.checkpoint.refused_of(layers);
        if let Some(reason) = self.settings.iter().find_map(refused) {
            return Err(BenchError::Options(reason));
        }
        let percent =
            |setting: &&Setting| matches!(setting.checkpoint, Checkpoint::BudgetPercent(_));
        if let (Some(limit), Some(setting)) = (self.fit, self.settings.iter().find(percent)) {
            return Err(BenchError::Options(format!(
                "--fit {limit} cannot be with {setting}: its first step runs without a budget, and would not fit; write budget=MIB, \
                 less than {limit} by the parameters and the optimizer's state"
            )));
        }
        Ok(())
    }

    /// What a step works on.
    pub fn workload(&self) -> Workload {
        let preset = self.preset.workload();
        Workload {
            layers: self.layers.unwrap_or(preset.layers),
            heads: self.heads.unwrap_or(preset.heads),
            width: self.width.unwrap_or(preset.width),
            context: self.context.unwrap_or(preset.context),
            batch: self.batch.unwrap_or(preset.batch),
            vocabulary: self.vocabulary.unwrap_or(preset.vocabulary),
            dropout: self.dropout,
        }
    }

    /// Rounds that are timed.
    pub fn steps(&self) -> usize {
        self.steps.unwrap_or(self.preset.steps())
    }

    /// Rounds before them.
    pub fn warmup(&self) -> usize {
        self.warmup.unwrap_or(self.preset.warmup())
    }

    /// How long there may be further rounds.
    pub fn time_limit(&self) -> Option<Duration> {
        self.max_seconds
            .map(|seconds| Duration::from_secs(seconds as u64))
    }

    /// The arguments with which another process measures one of these settings alone, into this
    /// file, in its share of the time.
    pub fn alone(&self, setting: Setting, output: &Path) -> Vec<OsString> {
        let workload = self.workload();
        let mut arguments: Vec<OsString> = Vec::new();
        let mut push = |name: &str, value: OsString| arguments.extend([name.into(), value]);
        push("--settings", setting.to_string().into());
        push("--backend", self.backend.name().into());
        push("--preset", self.preset.name().into());
        for (name, value) in [
            ("--steps", self.steps()),
            ("--warmup", self.warmup()),
            ("--layers", workload.layers),
            ("--heads", workload.heads),
            ("--width", workload.width),
            ("--context", workload.context),
            ("--batch", workload.batch),
            ("--vocabulary", workload.vocabulary),
        ] {
            push(name, value.to_string().into());
        }
        push("--seed", self.seed.to_string().into());
        push("--dropout", self.dropout.to_string().into());
        if let Some(seconds) = self.max_seconds {
            let share = (seconds / self.settings.len()).max(1);
            push("--max-seconds", share.to_string().into());
        }
        push("--output", output.into());
        arguments
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::setting::Stack;

    fn parse(arguments: &str) -> Result<Options, String> {
        let arguments = ["bench"].into_iter().chain(arguments.split_whitespace());
        let options = Options::try_parse_from(arguments).map_err(|error| error.to_string())?;
        options.validate().map_err(|error| error.to_string())?;
        Ok(options)
    }

    #[test]
    fn defaults_are_valid() {
        let options = parse("").unwrap();
        assert_eq!(options.settings[0], Stack::Bare.into());
        assert_eq!(options.settings.len(), 4);
        assert_eq!(options.workload(), Preset::Small.workload());
        assert_eq!(options.time_limit(), None);
    }

    #[test]
    fn options_go_before_the_preset_and_the_last_word_counts() {
        let options = parse(
            "--preset gpt2 --layers 2 --settings bf16 --settings bare,f16,block,bf16+budget=40%",
        )
        .unwrap();
        let expected = Workload {
            layers: 2,
            ..Preset::Gpt2.workload()
        };
        assert_eq!(options.workload(), expected);
        let settings: Vec<_> = options.settings.iter().map(Setting::to_string).collect();
        assert_eq!(settings, ["bare", "f16", "block", "bf16+budget=40%"]);
    }

    #[test]
    fn another_process_is_told_the_same() {
        let options = parse(
            "--settings bare,f16+block --preset gpt2 --width 96 --steps 7 --seed 3 --max-seconds 60 --backend vulkan \
             --memory --output all.json --plot all.svg",
        )
        .unwrap();
        let arguments = options.alone(options.settings[1], Path::new("one.json"));
        let alone = Options::try_parse_from(["bench".into()].into_iter().chain(arguments)).unwrap();
        assert_eq!(alone.settings, options.settings[1..]);
        assert_eq!(alone.workload(), options.workload());
        assert_eq!((alone.steps(), alone.warmup()), (7, options.warmup()));
        assert_eq!((alone.seed, alone.max_seconds), (3, Some(30)));
        assert_eq!(alone.backend, BackendName::Vulkan);
        assert_eq!(alone.output, Some("one.json".into()));
        assert!(!alone.memory && alone.plot.is_none());
    }

    #[test]
    fn wrong_values_are_refused_with_the_reason() {
        for (arguments, reason) in [
            ("--steps 0", "0 is not in 1.."),
            ("--settings fp8", "bf16, f16, what becomes"),
            (
                "--settings units --layers 1",
                "two blocks or more: --layers is 1",
            ),
            (
                "--fit 300 --settings bare,budget=40%",
                "--fit 300 cannot be with budget=40%",
            ),
            ("--fit 300 --batch 8", "cannot be used with '--batch"),
            ("--preset huge", "[possible values: small, gpt2]"),
            (
                "--heads 3",
                "--heads 3 does not divide --width 128; the nearest width that it divides is 129",
            ),
            ("--compare a --memory", "cannot be used with '--memory'"),
        ] {
            let error = parse(arguments).unwrap_err();
            assert!(error.contains(reason), "{arguments}: {error}");
        }
    }
}
