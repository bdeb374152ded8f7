//! What is known about a skipped step.

use burn::tensor::{Tensor, backend::Backend, read_sync};
use burn_decorator::non_finite::exact;

/// A step that was skipped because some of its gradients were infinite or NaN.
#[derive(Debug, Clone, PartialEq)]
pub struct Overflow {
    /// Number of the step, counted from 1 (skipped steps count).
    pub step: u64,
    /// The loss scale it was computed with.
    pub scale: f32,
    /// Paths of all parameters with a non-finite gradient, such as
    /// `blocks.3.attention.query.weight`: in module order, or in the order of their names where
    /// several ranks decide together.
    pub parameters: Vec<String>,
    /// Where the non-finite values came from.
    pub cause: OverflowCause,
}

/// Where the non-finite gradients of a skipped step came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverflowCause {
    /// The loss was finite (or not seen): the scaled backward pass overflowed. A smaller scale
    /// helps.
    Gradient,
    /// The loss was NaN or infinite before it was scaled: the forward pass or the data are at
    /// fault.
    NonFiniteLoss,
}

/// A loss of the current step, kept on its device and read only when an overflow has to be
/// explained.
pub(super) struct LossProbe(Box<dyn FnOnce() -> bool + Send>);

impl LossProbe {
    pub(super) fn new<I: Backend>(loss: Tensor<I, 1>) -> Self {
        // Where it was not reduced, one number is read instead of all its elements.
        let number = match loss.shape().num_elements() {
            1 => loss,
            _ => exact(loss),
        };
        Self(Box::new(move || {
            let data = read_sync(number.into_data_async());
            let data = data.expect("the loss can be read from its device");
            data.iter::<f64>().any(|value| !value.is_finite())
        }))
    }

    /// Reads the loss: is any of it NaN or infinite?
    pub(super) fn found_non_finite(self) -> bool {
        (self.0)()
    }
}
