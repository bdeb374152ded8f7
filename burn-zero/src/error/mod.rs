//! The errors of this crate, with the values.

mod config;
mod record;
mod sharding;

use burn_ranks::{BufferLength, InvalidSetting, RanksError};
use burn_update::UpdateError;
use thiserror::Error;

pub use config::ConfigFault;
pub use record::RecordFault;
pub use sharding::ShardingFault;

/// The name of a reduction in an update's errors.
pub(crate) const REDUCE: &str = "reduce";

/// The name of a configuration in an update's errors.
const DEEPSPEED: &str = "DeepSpeed";

/// Errors of ZeRO. Functions that make or run an update return it as an `UpdateError`. A variant of
/// one part of the crate holds the fault of that part, which says what is wrong:
///
/// ```
/// use burn_zero::{ZeroError, record::{RecordFault, ShardedRecord}};
///
/// let folder = tempfile::tempdir().unwrap();
/// match ShardedRecord::open(folder.path(), None) {
///     Ok(record) => println!("goes on at step {}", record.state().step),
///     Err(ZeroError::Record(RecordFault::NoRecord { .. })) => println!("begins"),
///     Err(error) => panic!("{error}"),
/// }
/// ```
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ZeroError {
    /// The group of ranks is lost, cannot start, or its ranks disagree.
    #[error(transparent)]
    Ranks(RanksError),

    /// A model, an optimizer or a backend that cannot be sharded with these settings.
    #[error(transparent)]
    Sharding(#[from] ShardingFault),

    /// A configuration that cannot work, of DeepSpeed's JSON for example.
    #[error(transparent)]
    Config(#[from] ConfigFault),

    /// A sharded record that cannot be saved or loaded.
    #[error(transparent)]
    Record(#[from] RecordFault),

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

/// A setting and the length of a buffer are refused under one name, whichever crate finds them.
impl From<RanksError> for ZeroError {
    fn from(error: RanksError) -> Self {
        match error {
            RanksError::InvalidSetting(cause) => Self::InvalidSetting(cause),
            RanksError::BufferLength(cause) => Self::BufferLength(cause),
            other => Self::Ranks(other),
        }
    }
}

/// A fault of the group stays one, so that the rank that failed is named.
impl From<ZeroError> for UpdateError {
    fn from(error: ZeroError) -> Self {
        match error {
            ZeroError::Ranks(error) => Self::Ranks(error),
            error @ ZeroError::Config(_) => Self::of_part(DEEPSPEED, error),
            other => Self::of_part(REDUCE, other),
        }
    }
}

impl From<ConfigFault> for UpdateError {
    fn from(fault: ConfigFault) -> Self {
        ZeroError::from(fault).into()
    }
}

impl From<ShardingFault> for UpdateError {
    fn from(error: ShardingFault) -> Self {
        ZeroError::from(error).into()
    }
}

/// Panics with the error, where the signature of a trait allows no other failure.
pub(crate) fn raise<T>(result: Result<T, impl core::fmt::Display>) -> T {
    match result {
        Ok(value) => value,
        Err(error) => panic!("{error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeepSpeedConfig, ZeroConfig};

    #[test]
    fn errors_of_each_part_become_it_with_their_text() {
        fn read(text: &str) -> Result<DeepSpeedConfig, ZeroError> {
            ZeroConfig::from_deepspeed_json(text)?.try_into()
        }
        let error = read(r#"{"fp16": true}"#).expect_err("no object");
        assert!(matches!(&error, ZeroError::Config(_)), "{error:?}");
        assert!(error.to_string().starts_with("fp16: "), "{error}");

        let differ = RecordFault::RanksDiffer {
            difference: "the step, 1 and 2".into(),
        };
        let error = ZeroError::from(differ.clone());
        assert_eq!(error.to_string(), differ.to_string());
        assert_eq!(error, ZeroError::Record(differ));

        let refused = InvalidSetting::unless(false, "bucket_elements", 0, "at least 1");
        let refused = refused.expect_err("it does not hold");
        let error = ZeroError::from(RanksError::from(refused.clone()));
        assert_eq!(error, ZeroError::InvalidSetting(refused));
    }
}
