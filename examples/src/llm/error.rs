//! Why a model cannot be read.

use std::path::PathBuf;

use burn_zero::ZeroError;

/// Why a Hugging Face directory cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LlmError {
    /// A file cannot be read.
    #[error(transparent)]
    Io(#[from] std::io::Error),

    /// A file is not JSON, or lacks a key, or has a value of another type.
    #[error("{path}: {reason}", path = path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// The configuration asks for something that these models do not have.
    #[error("{path}: {key} is {value}, which is not supported: {instead}", path = path.display())]
    Unsupported {
        /// The configuration.
        path: PathBuf,
        /// Its key.
        key: &'static str,
        /// The key's value.
        value: String,
        /// What is supported.
        instead: &'static str,
    },

    /// A file of weights cannot be read, or is not a safetensors file.
    #[error(transparent)]
    Weights(#[from] ZeroError),

    /// The weights are those of another model.
    #[error("{folder}: {reason}", folder = folder.display())]
    OtherModel {
        /// The directory.
        folder: PathBuf,
        /// The first tensor that does not fit.
        reason: String,
    },

    /// A pattern of what is to be trained matches no parameter.
    #[error("{pattern:?} matches no parameter of the model: {instead}")]
    NoParameter {
        /// The pattern.
        pattern: String,
        /// What a pattern looks like.
        instead: &'static str,
    },
}
