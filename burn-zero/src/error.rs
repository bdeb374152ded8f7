//! The errors of this crate, with the values.

use std::sync::Arc;

use burn_ranks::{BufferLength, InvalidSetting, RanksError};
use burn_update::UpdateError;
use thiserror::Error;

use crate::{ConfigError, RecordError, ShardingError};

/// The name of a reduction in an update's errors.
pub(crate) const REDUCE: &str = "reduce";

/// Errors of ZeRO. The errors of one part of it, which its functions return, become variants of
/// this by `?`.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// The group of ranks is lost, cannot start, or its ranks disagree.
    #[error(transparent)]
    Ranks(#[from] RanksError),

    /// A model, an optimizer or a backend that cannot be sharded with these settings.
    #[error(transparent)]
    Sharding(#[from] ShardingError),

    /// A configuration that cannot work, of DeepSpeed's JSON for example.
    #[error(transparent)]
    Config(#[from] ConfigError),

    /// A sharded record that cannot be saved or loaded.
    #[error(transparent)]
    Record(Arc<RecordError>),

    /// A setting that cannot work, of a [`HostAdamWConfig`](crate::HostAdamWConfig) for example.
    #[error(transparent)]
    InvalidSetting(#[from] InvalidSetting),

    /// A buffer of another length than a [`HostAdamW`](crate::HostAdamW) has.
    #[error(transparent)]
    BufferLength(#[from] BufferLength),

    /// A tensor that cannot be read from its device.
    #[error("{what} cannot be read from its device: {reason}")]
    Read {
        /// The tensor, such as `the gradient of blocks.0.weight`.
        what: String,
        /// The backend's reason.
        reason: String,
    },

    /// The host has no memory for a buffer.
    #[error("{what}: no host memory for a buffer of {bytes} bytes: {reason}")]
    OutOfMemory {
        /// What needs the buffer.
        what: String,
        /// Bytes asked for.
        bytes: usize,
        /// The system's reason.
        reason: String,
    },
}

/// An error of the group or of the optimizer is that of the record no longer.
impl From<RecordError> for ZeroError {
    fn from(error: RecordError) -> Self {
        match error {
            RecordError::State(error) => Self::Sharding(error),
            RecordError::Group(error) => error,
            error => Self::Record(Arc::new(error)),
        }
    }
}

/// A fault of the group stays one, so that the rank that failed is named.
impl From<ZeroError> for UpdateError {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Ranks(error) => Self::Ranks(error),
            other => Self::of_part(REDUCE, other),
        }
    }
}

impl From<ShardingError> for UpdateError {
    fn from(error: ShardingError) -> Self {
        ZeroError::from(error).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeepSpeedConfig, ZeroConfig};

    #[test]
    fn errors_of_each_part_become_it_with_their_text() {
        fn read(text: &str) -> Result<DeepSpeedConfig, ZeroError> {
            Ok(ZeroConfig::from_deepspeed_json(text)?.try_into()?)
        }
        let error = read(r#"{"fp16": true}"#).expect_err("no object");
        assert!(matches!(&error, ZeroError::Config(_)), "{error:?}");
        assert!(error.to_string().starts_with("fp16: "), "{error}");

        let torn = || RecordError::RanksDiffer {
            difference: "the step, 1 and 2".into(),
        };
        let error = ZeroError::from(torn());
        assert_eq!(error.to_string(), torn().to_string());
        assert_eq!(error, ZeroError::from(torn()));
        let shared = RecordError::from(error.clone());
        assert!(matches!(shared, RecordError::Group(_)), "{shared:?}");
        drop(shared);
        assert_eq!(RecordError::from(error), torn());
        let of_group = ZeroError::Read {
            what: "the gradient of weight".into(),
            reason: "the device is lost".into(),
        };
        let of_record = RecordError::from(of_group.clone());
        assert_eq!(ZeroError::from(of_record), of_group);
    }
}
