//! What can be wrong with a configuration, with the place and the values.

use thiserror::Error;

/// Errors of [`ZeroConfig`](super::ZeroConfig). Paths are those of the JSON: `zero_optimization.offload_optimizer.device`.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The text is no JSON. Comments, trailing commas, `NaN` and `Infinity` are none either.
    #[error("the configuration is no JSON: {message}")]
    Syntax {
        /// What the parser says, with the line and the column.
        message: String,
    },
    /// A key that DeepSpeed does not have.
    #[error("{path}: there is no such key{}", nearest.as_ref().map_or(String::new(), |key| format!("; the nearest is `{key}`")))]
    UnknownKey {
        /// Where.
        path: String,
        /// The nearest valid key of the same section.
        nearest: Option<String>,
    },
    /// A key that occurs twice in its section.
    #[error("{path}: the key stands there twice")]
    DuplicateKey {
        /// Where.
        path: String,
    },
    /// A value of a wrong type, or an unknown choice.
    #[error("{path}: {message}")]
    WrongType {
        /// Where.
        path: String,
        /// The value, and what was expected.
        message: String,
    },
    /// A value out of bounds.
    #[error("{path}: {value}, but it must be {expected}")]
    InvalidValue {
        /// Where.
        path: String,
        /// The value.
        value: String,
        /// What it must be.
        expected: &'static str,
    },
    /// `"auto"` where neither the program nor the file has a value.
    #[error(
        "{path}: \"auto\", and nothing fills it in: set AutoValues::{option}, or put a value there"
    )]
    Auto {
        /// Where.
        path: String,
        /// The field of [`AutoValues`](super::AutoValues) that fills it.
        option: &'static str,
    },
    /// What DeepSpeed has and this crate does not.
    #[error("{path}: {value} is not supported: {instead}")]
    Unsupported {
        /// Where.
        path: String,
        /// The beginning of the value.
        value: String,
        /// Why, and what to do instead.
        instead: &'static str,
    },
    /// Two keys that exclude each other.
    #[error("{first} and {second} are both there: {reason}")]
    Contradiction {
        /// One of them.
        first: &'static str,
        /// The other.
        second: &'static str,
        /// Why that cannot be.
        reason: &'static str,
    },
    /// All three batch sizes are there and do not fit together.
    #[error(
        "train_batch_size {train}, but train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {steps} x \
         {world_size} ranks = {}",
        u128::from(*micro) * u128::from(*steps) * (*world_size as u128)
    )]
    BatchContradiction {
        /// `train_batch_size`
        train: u64,
        /// `train_micro_batch_size_per_gpu`
        micro: u64,
        /// `gradient_accumulation_steps`
        steps: u64,
        /// Ranks.
        world_size: usize,
    },
    /// The batch cannot be divided evenly.
    #[error("train_batch_size {train} is no multiple of {world_size} ranks x {name} {value} = {}", u128::from(*value) * (*world_size as u128))]
    BatchRemainder {
        /// `train_batch_size`
        train: u64,
        /// The other size there is: `train_micro_batch_size_per_gpu` or `gradient_accumulation_steps`.
        name: &'static str,
        /// Its value.
        value: u64,
        /// Ranks.
        world_size: usize,
    },
    /// No batch size at all, or only `"auto"`.
    #[error(
        "neither train_batch_size nor train_micro_batch_size_per_gpu has a number: put one there, or set it in \
         ZeroConfig::batch"
    )]
    NoBatchSize,
    /// A job of no ranks.
    #[error("a world of 0 ranks: there must be at least 1")]
    NoRanks,
}

impl ConfigError {
    /// Where in the JSON, if the error is about one place.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::UnknownKey { path, .. }
            | Self::DuplicateKey { path }
            | Self::WrongType { path, .. }
            | Self::InvalidValue { path, .. }
            | Self::Auto { path, .. }
            | Self::Unsupported { path, .. } => Some(path),
            Self::Contradiction { second, .. } => Some(second),
            _ => None,
        }
    }

    pub(super) fn invalid(path: &str, value: impl ToString, expected: &'static str) -> Self {
        Self::InvalidValue {
            path: path.to_owned(),
            value: value.to_string(),
            expected,
        }
    }
}
