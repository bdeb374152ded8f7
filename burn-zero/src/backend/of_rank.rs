//! Gradients of one rank: who reads one outside of the update gets another number than one rank
//! alone would.

use std::sync::Once;

use burn_decorator::gradient::is_updating;

use super::placed::{GradientPart, OfRank, PlacedTensor};

impl<T, D> PlacedTensor<T, D> {
    /// The gradient, marked as one rank's.
    pub(super) fn of_rank(self, part: Option<GradientPart>) -> Self {
        match part {
            None => self,
            Some(part) => Self::OfRank(OfRank {
                tensor: Box::new(self),
                part,
            }),
        }
    }

    /// The tensor without its mark.
    pub(crate) fn unmarked(self) -> Self {
        match self {
            Self::OfRank(gradient) => *gradient.tensor,
            other => other,
        }
    }

    pub(super) fn placed(&self) -> &Self {
        match self {
            Self::OfRank(gradient) => &gradient.tensor,
            other => other,
        }
    }

    pub(super) fn part(&self) -> Option<GradientPart> {
        match self {
            Self::OfRank(gradient) => Some(gradient.part),
            _ => None,
        }
    }

    /// The operand of an operation that is linear in it: its result is a gradient of the same kind,
    /// which an update reads as it is.
    #[inline]
    pub(super) fn linear(self) -> (Self, Option<GradientPart>) {
        let part = self.part().filter(|_| !is_updating());
        (self.unmarked(), part)
    }

    /// The operand of any other operation. Warns, once in a process, if it is a gradient of one
    /// rank and no update reads it.
    #[inline]
    pub(super) fn read(self) -> Self {
        if let Some(part) = self.part() {
            warn(part);
        }
        self.unmarked()
    }
}

#[cold]
fn warn(part: GradientPart) {
    static WARNED: Once = Once::new();
    if is_updating() {
        return;
    }
    WARNED.call_once(|| {
        burn_decorator::warn_user!(
            "a gradient is read outside of the update, where it is {part}: a norm or a sum of gradients differs from rank to rank. \
             `RankReduction::global_norm(&model, &gradients)`, called on all ranks, is the norm over all of them. To clip by it, clip in the \
             update: `Update::new(optimizer).clip_norm(1.0)?.reduce(settings, group)?`"
        );
    });
}
