//! What can go wrong, with the values.

use burn_backend::DType;
use thiserror::Error;

use super::HostAdamWError;
use crate::ZeroError;

/// Errors of offloaded optimizers. A step panics with their message; those of its parameters and gradients are found before
/// anything has changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A setting that cannot work.
    #[error("offload: {name} = {value}, but it must be {expected}")]
    InvalidValue {
        /// Which setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        expected: &'static str,
    },

    /// A number that AdamW cannot work with.
    #[error(transparent)]
    Host(#[from] HostAdamWError),

    /// The host optimizer of a parameter.
    #[error("offload of {path}: {source}")]
    Parameter {
        /// Path of the parameter.
        path: String,
        /// What is wrong.
        source: HostAdamWError,
    },

    /// Gradients that were to leave during backward.
    #[error(transparent)]
    Leaving(#[from] ZeroError),

    /// A type that the host does not update.
    #[error(
        "offload: {path} is {dtype:?}, but f32, bf16 and f16 are updated on the host: cast it, or keep its optimizer on the device"
    )]
    UnsupportedDtype {
        /// Path of the parameter, or of its gradient.
        path: String,
        /// Its type.
        dtype: DType,
    },

    /// More dimensions than modules of the host are made for.
    #[error(
        "offload: {path} has {dimensions} dimensions, but optimizers on the host backend update at most 8, as Burn's records of them do"
    )]
    TooManyDimensions {
        /// Path of the parameter.
        path: String,
        /// Its dimensions.
        dimensions: usize,
    },

    /// A gradient or state of another shape than the parameter's.
    #[error(
        "offload: {what} of {path} is {found:?}, but the parameter is {expected:?}: it belongs to another model"
    )]
    OtherShape {
        /// The gradient, or which part of the state.
        what: &'static str,
        /// Path of the parameter.
        path: String,
        /// Its shape.
        found: Vec<usize>,
        /// The parameter's shape.
        expected: Vec<usize>,
    },

    /// A record of Adam with AMSGrad.
    #[error(
        "offload: the record is of AMSGrad, whose third moment the host optimizer does not have: go on with Burn's AdamW, or start \
         without the optimizer's record"
    )]
    AmsGrad,
}
