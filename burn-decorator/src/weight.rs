//! The weight of a loss, told by the code that multiplied the loss to decorators that scale it.
//!
//! A loss that is multiplied by 64 k tokens takes 16 bits of what f16 leaves to a loss scale. The
//! decorator that scales it divides by the weight and multiplies the f32 gradients instead; a
//! decorator below that passes gradients on during backward multiplies its own.

use crate::carried;

/// What the loss was multiplied by: a tensor primitive of one f32 element, of the inner backend.
pub struct LossWeight<T>(pub T);

/// What gradients are still to be multiplied by, in f32, likewise.
pub struct GradientWeight<T>(pub T);

/// Runs `backward`, in which a decorator below may [`take`] the weight. Returns the weight if none
/// did.
pub fn offer<W: 'static, R>(weight: W, backward: impl FnOnce() -> R) -> (R, Option<W>) {
    carried::carry(weight, backward)
}

/// The weight that is offered, if it is of this type: who takes it applies it.
pub fn take<W: 'static>() -> Option<W> {
    carried::take()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_weight_is_taken_once_by_its_type() {
        let backward = || {
            (
                take::<LossWeight<u8>>().is_some(),
                take::<LossWeight<f32>>(),
            )
        };
        let ((other, taken), left) = offer(LossWeight(2.0_f32), backward);
        assert!(!other && left.is_none());
        assert_eq!(taken.map(|weight| weight.0), Some(2.0));

        let (inner, left) = offer(LossWeight(2.0_f32), || offer(GradientWeight(3_u8), || ()).1);
        assert_eq!(inner.map(|weight| weight.0), Some(3));
        assert_eq!(left.map(|weight| weight.0), Some(2.0));
        assert!(take::<LossWeight<f32>>().is_none());
    }
}
