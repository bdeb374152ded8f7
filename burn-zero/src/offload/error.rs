//! What can go wrong, with the values.

use burn_backend::DType;
use thiserror::Error;

use crate::ZeroError;

/// Errors of offloaded optimizers. A step panics with their message; those of its parameters and gradients are found before
/// anything has changed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum OffloadError {
    /// A setting or an argument that cannot work.
    #[error("offload: {name} = {value}, but it must be {expected}")]
    InvalidValue {
        /// Which one.
        name: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        expected: &'static str,
    },

    /// The host has no memory for the state.
    #[error(
        "HostAdamW: no host memory for a buffer of {bytes} bytes: {source}; each parameter takes 12 bytes here"
    )]
    OutOfMemory {
        /// Bytes asked for, of one of three buffers.
        bytes: usize,
        /// What the system says.
        source: std::io::Error,
    },

    /// Slices that belong together differ in length.
    #[error("HostAdamW: {actual} elements of {what}, but {expected} are needed")]
    LengthMismatch {
        /// Which slice.
        what: &'static str,
        /// How many elements it must have.
        expected: usize,
        /// How many it has.
        actual: usize,
    },

    /// The update of a parameter on the host.
    #[error("offload of {path}: {source}")]
    Parameter {
        /// Path of the parameter.
        path: String,
        /// What is wrong.
        source: Box<OffloadError>,
    },

    /// The reducer that brings gradients to the host during backward.
    #[error(transparent)]
    Reducer(#[from] ZeroError),

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
        /// The gradient, or the optimizer's state.
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
