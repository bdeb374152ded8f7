//! An effective batch in micro-batches. No burn import.

use core::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{AccumConfig, AccumError, Normalization};

/// An effective batch, split into a window of micro-batches that add up to it exactly: all have the
/// same size, only the last may be smaller.
///
/// ```
/// use burn_accum::{AccumConfig, Normalization, Partition};
///
/// let partition = Partition::new(10, 4)?;
/// assert_eq!(partition.sizes().collect::<Vec<_>>(), [4, 4, 2]);
/// // Which items of the effective batch are in each.
/// assert_eq!(partition.ranges().last(), Some(8..10));
///
/// // The mean over all items is exact.
/// assert_eq!(partition.config(Normalization::Tokens)?, AccumConfig::tokens(3));
/// // The mean over three micro-batches would give the last two items twice the weight.
/// assert!(partition.config(Normalization::Mean).is_err());
/// assert_eq!(Partition::new(10, 2)?.config(Normalization::Mean)?, AccumConfig::mean(5));
/// # Ok::<(), burn_accum::AccumError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partition {
    effective_batch: usize,
    micro_batch: usize,
}

impl Partition {
    /// Micro-batches of `micro_batch` items, and a smaller one for the remainder if there is one.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`] if one of the two is 0,
    /// [`AccumError::LargerThanEffectiveBatch`].
    pub fn new(effective_batch: usize, micro_batch: usize) -> Result<Self, AccumError> {
        AccumError::unless_positive("effective_batch", effective_batch)?;
        AccumError::unless_positive("micro_batch", micro_batch)?;
        if micro_batch > effective_batch {
            return Err(AccumError::LargerThanEffectiveBatch {
                micro_batch,
                effective_batch,
            });
        }
        Ok(Self {
            effective_batch,
            micro_batch,
        })
    }

    /// Items in an update.
    pub fn effective_batch(&self) -> usize {
        self.effective_batch
    }

    /// Items in a micro-batch; in the last one perhaps fewer.
    pub fn micro_batch(&self) -> usize {
        self.micro_batch
    }

    /// Length of the window: [`AccumConfig::steps`].
    pub fn steps(&self) -> usize {
        self.effective_batch.div_ceil(self.micro_batch)
    }

    /// Items in the last micro-batch.
    pub fn last(&self) -> usize {
        self.effective_batch - (self.steps() - 1) * self.micro_batch
    }

    /// Whether the last micro-batch is as large as the others.
    pub fn is_even(&self) -> bool {
        self.last() == self.micro_batch
    }

    /// The sizes of a window's micro-batches, in order.
    pub fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        self.ranges().map(|range| range.len())
    }

    /// The items of a window's micro-batches, in order, counted from the window's first.
    pub fn ranges(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let Self {
            effective_batch,
            micro_batch,
        } = *self;
        let starts = (0..effective_batch).step_by(micro_batch);
        starts.map(move |start| start..(start + micro_batch).min(effective_batch))
    }

    /// The configuration under which a window of these micro-batches is one batch of their union.
    ///
    /// With `Sum` the loss must itself be a share of the update's.
    ///
    /// # Errors
    ///
    /// [`AccumError::UnevenMean`] for `Mean` if the last micro-batch is smaller.
    pub fn config(&self, normalization: Normalization) -> Result<AccumConfig, AccumError> {
        if normalization == Normalization::Mean && !self.is_even() {
            return Err(AccumError::UnevenMean {
                effective_batch: self.effective_batch,
                micro_batch: self.micro_batch,
                last: self.last(),
                even: largest_divisor(self.effective_batch, self.micro_batch),
            });
        }
        Ok(AccumConfig {
            steps: self.steps(),
            normalization,
        })
    }
}

/// The largest divisor of `number` that is at most `at_most`, which is not 0.
pub(crate) fn largest_divisor(number: usize, at_most: usize) -> usize {
    let small = (1..).take_while(|divisor| divisor * divisor <= number);
    let pairs = small.filter(|divisor| number.is_multiple_of(*divisor));
    pairs
        .flat_map(|divisor| [divisor, number / divisor])
        .filter(|divisor| *divisor <= at_most)
        .max()
        .unwrap_or(1)
}
