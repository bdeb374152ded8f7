//! Training steps between two validations, and why they end.

/// The steps between two validations: an epoch, or an interval of updates.
pub(super) struct Stretch {
    /// Counted from 1: what Burn's metrics, records and early stopping call an epoch.
    pub(super) number: usize,
    pub(super) steps: usize,
    /// Updates before it began.
    pub(super) updates_before: u64,
}

impl Stretch {
    pub(super) fn new(number: usize, updates_before: u64) -> Self {
        Self {
            number,
            steps: 0,
            updates_before,
        }
    }
}

/// Why a stretch of training steps has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// A rank has no more batches.
    Data,
    /// The interval of updates, or the training, is complete.
    Interval,
    /// A rank is interrupted.
    Interrupted,
}
