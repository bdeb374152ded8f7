//! What can go wrong, with the values.

use burn_backend::{DType, FloatDType};
use thiserror::Error;

use crate::table;
use burn_decorator::non_finite::name_some;

/// Errors of automatic mixed precision.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum AmpError {
    /// The device cannot compute in the policy's low type.
    #[error(
        "autocast to {low} is not possible on device {device} of backend {backend}: it can {usage} {low}, and autocast \
         needs storage and arithmetic; types it can do: {supported}",
        low = DType::from(*.dtype).name()
    )]
    UnsupportedDtype {
        /// The device.
        device: String,
        /// The backend's name.
        backend: String,
        /// The refused type.
        dtype: FloatDType,
        /// What the device can do with the type.
        usage: String,
        /// The float types that the device supports in full.
        supported: String,
    },
    /// A configuration names an operation that does not exist or does not compute with float
    /// tensors.
    #[error(
        "unknown operation `{name}`: nearest is `{nearest}`; operations that can be configured are: {valid}"
    )]
    UnknownOp {
        /// The name as given.
        name: String,
        /// The valid name that is most alike.
        nearest: String,
        /// All valid names.
        valid: String,
    },
    /// A configuration names an operation twice, with and without `float_`.
    #[error("operation `{op}` is configured twice, with and without `float_`")]
    DuplicateOp {
        /// The operation.
        op: &'static str,
    },
    /// A configuration names a policy that does not exist.
    #[error("unknown autocast policy `{name}`: valid policies are {valid}")]
    UnknownPolicy {
        /// The name as given.
        name: String,
        /// All valid names.
        valid: String,
    },

    /// A field of [`GradScalerConfig`](crate::GradScalerConfig) holds a value that cannot work.
    #[error("GradScalerConfig: {field} = {value}, but it must be {expected}")]
    InvalidScalerConfig {
        /// Name of the field.
        field: &'static str,
        /// The value found there.
        value: String,
        /// What the field accepts.
        expected: &'static str,
    },

    /// Gradients are still non-finite although the loss scale cannot be lowered any further
    /// (DeepSpeed: "Current loss scale already at minimum").
    #[error(
        "loss scale collapsed: step {step} overflowed at scale {scale}, which cannot be lowered; non-finite gradients in {}{}",
        name_some(.parameters), of_which(*.scalers)
    )]
    ScaleCollapsed {
        /// The loss scale of the failing step.
        scale: f32,
        /// Number of the failing step, counted from 1.
        step: u64,
        /// Paths of all parameters whose gradients were non-finite.
        parameters: Vec<String>,
        /// Loss scalers that live on the thread. With several, the loss may have been scaled by
        /// another one.
        scalers: usize,
    },

    /// The loss was NaN or infinite before scaling in each of the first steps: no loss scale helps.
    #[error(
        "the loss was NaN or infinite in each of the last {attempts} steps and no step has been taken yet: this is not \
         an overflow of scaled gradients (step {step}, scale {scale}) and lowering the loss scale cannot help; look \
         for the cause in the data, the initialisation or the forward pass"
    )]
    NonFiniteLoss {
        /// Number of the last of these steps, counted from 1.
        step: u64,
        /// The loss scale of that step.
        scale: f32,
        /// How many steps in a row were skipped for this reason.
        attempts: u32,
    },

    /// A trained parameter is itself in half precision (PyTorch: "Attempting to unscale FP16
    /// gradients").
    #[error(
        "attempting to unscale {dtype:?} gradients: parameter `{path}` is stored as {dtype:?}, but an update with a loss \
         scale needs f32 parameters (autocast lowers the precision of operations, not of parameters)"
    )]
    HalfPrecisionParameter {
        /// Path of the parameter in its module.
        path: String,
        /// Its data type.
        dtype: DType,
    },
}

/// What to do where the loss may have been scaled by another one of the thread's scalers.
fn of_which(scalers: usize) -> String {
    match scalers {
        0 | 1 => String::new(),
        _ => format!(
            "; {scalers} loss scalers live on this thread: say whose each loss is with `scaler.backward(loss)`, or let all \
             updates share one"
        ),
    }
}

impl AmpError {
    pub(crate) fn unknown_op(name: &str) -> Self {
        let names = || table::castable_rows().map(|row| row.short_name());
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
