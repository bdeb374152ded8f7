//! What can go wrong, with the values.

use thiserror::Error;

use crate::table;

/// Errors of automatic mixed precision.
#[derive(Clone, Debug, PartialEq, Error)]
pub enum AmpError {
    /// The device cannot compute in the policy's low type.
    #[error(
        "autocast to {dtype} is not possible on device {device} of backend {backend}: it can {usage} {dtype}, and \
         autocast needs storage and arithmetic; types it can do: {supported}"
    )]
    UnsupportedDtype {
        /// The device.
        device: String,
        /// The backend's name.
        backend: String,
        /// The refused type.
        dtype: String,
        /// What the device can do with the type.
        usage: String,
        /// The float types that the device supports in full.
        supported: String,
    },
    /// A configuration names an operation that does not exist or takes no float tensor.
    #[error(
        "unknown operation `{name}`: nearest is `{nearest}`; operations with float operands are: {valid}"
    )]
    UnknownOp {
        /// The name as given.
        name: String,
        /// The valid name that is most alike.
        nearest: String,
        /// All valid names.
        valid: String,
    },
    /// A configuration names a policy that does not exist.
    #[error("unknown autocast policy `{name}`: valid policies are {valid}")]
    UnknownPolicy {
        /// The name as given.
        name: String,
        /// All valid names.
        valid: String,
    },
}

impl AmpError {
    pub(crate) fn unknown_op(name: &str) -> Self {
        let names = || {
            table::op_table()
                .iter()
                .filter(|row| row.float_operands)
                .map(|row| row.short_name())
        };
        Self::UnknownOp {
            name: name.to_owned(),
            nearest: names()
                .min_by_key(|valid| strsim::levenshtein(name, valid))
                .unwrap_or_default()
                .to_owned(),
            valid: names().collect::<Vec<_>>().join(", "),
        }
    }
}
