//! How a tensor was computed, where an operation that takes it can use that.
//!
//! Burn's losses, norms and activations are written with plain operations. In a low type a
//! difference, a product or a probability would be rounded, or leave the range, before the loss
//! makes an f32 number of it; PyTorch's losses are single operations that begin in f32. So a low
//! result remembers its operands, and an operation of class `full` computes it from these in f32
//! rather than from the rounded result.

use std::fmt;
use std::sync::OnceLock;

/// How many operations, one on the result of another, are computed again in f32: as many as
/// burn-nn's longest loss has between its operands and its first f32 operation, and two more. It
/// bounds the tensors that a result keeps.
pub(super) const MOST_STEPS: u8 = 6;

/// How a tensor was computed.
pub(super) enum Origin<T> {
    /// A low tensor.
    Low(Low<T>),
    /// `e^exponent`, an f32 tensor.
    Exp { exponent: T },
    /// `e^exponent + 1`, an f32 tensor.
    ExpPlusOne { exponent: T },
}

/// The f32 value of a low tensor.
pub(super) struct Low<T> {
    /// Set at the first use.
    wide: OnceLock<T>,
    /// Computes it from the operands of the operation; `None` where the low tensor is cast.
    compute: Option<Box<dyn Fn() -> T + Send + Sync>>,
    /// Through how many operations.
    steps: u8,
    /// The f32 statistic that was cast to this low tensor by an explicit cast: only a division by
    /// it uses it.
    statistic: Option<T>,
}

impl<T: Clone> Low<T> {
    /// See [`Origin::statistic`].
    pub(super) fn divisor(&self) -> Option<T> {
        self.statistic.clone()
    }

    /// The f32 value, once computed the same tensor for all.
    pub(super) fn wide(&self, cast: impl FnOnce() -> T) -> T {
        let compute = || match &self.compute {
            Some(compute) => compute(),
            None => cast(),
        };
        self.wide.get_or_init(compute).clone()
    }
}

impl<T> Origin<T> {
    /// A low tensor whose f32 value is its cast.
    pub(super) fn stored() -> Self {
        Self::Low(Low {
            wide: OnceLock::new(),
            compute: None,
            steps: 0,
            statistic: None,
        })
    }

    /// A low tensor whose f32 value is computed from operands, which are computed again through
    /// `steps` operations.
    pub(super) fn computed(steps: u8, compute: impl Fn() -> T + Send + Sync + 'static) -> Self {
        Self::Low(Low {
            wide: OnceLock::new(),
            compute: Some(Box::new(compute)),
            steps: steps + 1,
            statistic: None,
        })
    }

    /// A low tensor whose f32 value is at hand.
    pub(super) fn rounded(wide: T) -> Self {
        Self::Low(Low {
            wide: OnceLock::from(wide),
            compute: None,
            steps: 1,
            statistic: None,
        })
    }

    /// A low tensor that an explicit cast made of an f32 statistic.
    pub(super) fn statistic(statistic: T) -> Self {
        Self::Low(Low {
            wide: OnceLock::new(),
            compute: None,
            steps: 0,
            statistic: Some(statistic),
        })
    }

    /// Through how many operations the f32 value is computed.
    pub(super) fn steps(&self) -> u8 {
        match self {
            Self::Low(low) => low.steps,
            Self::Exp { .. } | Self::ExpPlusOne { .. } => 0,
        }
    }
}

impl<T> fmt::Debug for Origin<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Low(low) if low.compute.is_some() => "Computed",
            Self::Low(_) => "Low",
            Self::Exp { .. } => "Exp",
            Self::ExpPlusOne { .. } => "ExpPlusOne",
        })
    }
}
