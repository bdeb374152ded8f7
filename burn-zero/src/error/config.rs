//! The faults of configurations.

use thiserror::Error;

/// Why a [`ZeroConfig`](crate::ZeroConfig) cannot work.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ConfigFault {
    /// The text is not JSON, which has no comments, trailing commas, `NaN` or `Infinity`. With the
    /// parser's message, which has the line and the column.
    #[error("the configuration is no JSON: {0}")]
    Syntax(String),
    /// A key or its value is refused.
    #[error("{path}: {reason}")]
    Key {
        /// Where: `zero_optimization.offload_optimizer.device`.
        path: String,
        /// Why, with the value, and what to put there instead.
        reason: String,
    },
    /// The batch sizes contradict each other, or do not determine the missing ones.
    #[error("{0}")]
    Batch(String),
}

impl ConfigFault {
    /// Where in the JSON, if the error is about one place.
    pub fn path(&self) -> Option<&str> {
        match self {
            Self::Key { path, .. } => Some(path),
            _ => None,
        }
    }

    pub(crate) fn key(path: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Key {
            path: path.into(),
            reason: reason.into(),
        }
    }

    pub(crate) fn invalid(path: &str, value: impl ToString, expected: &str) -> Self {
        let value = value.to_string();
        Self::key(path, format!("{value}, but it must be {expected}"))
    }

    pub(crate) fn unsupported(path: impl Into<String>, value: &str, instead: &str) -> Self {
        Self::key(path, format!("{value} is not supported: {instead}"))
    }

    pub(crate) fn require(
        is_met: bool,
        path: &str,
        value: impl ToString,
        expected: &str,
    ) -> Result<(), Self> {
        if is_met {
            return Ok(());
        }
        Err(Self::invalid(path, value, expected))
    }
}
