//! The request of a search.

use serde::{Deserialize, Serialize};

use super::partition::largest_divisor;
use crate::{AccumError, Normalization};

/// The share of the limit that stays free, Lightning's `margin`.
const MARGIN: f64 = 0.05;

/// What [`find_micro_batch`](super::find_micro_batch) looks for: the largest micro-batch of an
/// effective batch that stays below a limit.
///
/// ```
/// use burn_accum::{MicroBatchSearch, Normalization};
///
/// // Below 8 GiB, and any micro-batch will do: the last one of a window may be smaller.
/// let search = MicroBatchSearch::new(480, 8 << 30).with_normalization(Normalization::Tokens);
/// assert!(search.validate().is_ok());
/// assert!(search.with_margin(1.0).validate().is_err());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct MicroBatchSearch {
    /// Items in an update.
    pub effective_batch: usize,
    /// The most that may be in use, in bytes: the device's memory
    /// ([`host_memory_bytes`](super::host_memory_bytes)), or less.
    pub limit_bytes: u64,
    /// The share of the limit that stays free, for what a trial does not see: fragmentation, peaks
    /// between two samples, other sizes of sequences. Default 0.05.
    pub margin: f64,
    /// The normalization that the training uses. `Mean`, the default, is exact for micro-batches of
    /// equal size only, so only divisors of the effective batch are found; otherwise the last
    /// micro-batch may be smaller.
    pub normalization: Normalization,
    /// Where an estimate lets the search begin. Default: with a size of 1.
    #[serde(default)]
    pub start: Option<EstimatedStart>,
}

/// What an estimate says of a step's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct EstimatedStart {
    /// The largest micro-batch that fits by the estimate.
    pub micro_batch: usize,
    /// Bytes that an item adds there.
    pub item_bytes: u64,
}

impl MicroBatchSearch {
    /// A search for [`Normalization::Mean`], with 5 % of the limit free.
    pub fn new(effective_batch: usize, limit_bytes: u64) -> Self {
        Self {
            effective_batch,
            limit_bytes,
            margin: MARGIN,
            normalization: Normalization::default(),
            start: None,
        }
    }

    /// Chooses the share of the limit that stays free, at least 0 and below 1.
    #[must_use]
    pub fn with_margin(self, margin: f64) -> Self {
        Self { margin, ..self }
    }

    /// Chooses the normalization.
    #[must_use]
    pub fn with_normalization(self, normalization: Normalization) -> Self {
        Self {
            normalization,
            ..self
        }
    }

    /// Begins where an estimate of the peak of a micro-batch says, such as burn-estimate's of the
    /// same step: where it is near what is measured, one to three trials are enough. A wrong one
    /// costs trials, not correctness. `estimate` is called about `log2(effective batch)` times.
    ///
    /// ```
    /// # use burn_accum::MicroBatchSearch;
    /// let search = MicroBatchSearch::new(64, 1000).starting_at(|micro_batch| 100 + 30 * micro_batch as u64);
    /// assert_eq!(search.start.unwrap().micro_batch, 16); // 28 would fit, and 16 is the largest that divides 64
    /// ```
    #[must_use]
    pub fn starting_at(self, estimate: impl Fn(usize) -> u64) -> Self {
        let (mut fits, mut too_large) = (1, self.effective_batch + 1);
        while too_large - fits > 1 {
            let middle = fits + (too_large - fits) / 2;
            match estimate(middle) <= self.usable_bytes() {
                true => fits = middle,
                false => too_large = middle,
            }
        }
        let micro_batch = self.largest_allowed(fits);
        let (low, high) = match micro_batch {
            1 => (1, 2),
            size => (size / 2, size),
        };
        let item_bytes = estimate(high).saturating_sub(estimate(low)) / (high - low) as u64;
        let start = EstimatedStart {
            micro_batch,
            item_bytes,
        };
        Self {
            start: Some(start),
            ..self
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// [`AccumError::InvalidValue`].
    pub fn validate(&self) -> Result<(), AccumError> {
        AccumError::unless_positive("effective_batch", self.effective_batch)?;
        AccumError::unless(self.limit_bytes > 0, "limit_bytes", 0.0, "at least 1")?;
        let in_range = (0.0..1.0).contains(&self.margin);
        AccumError::unless(in_range, "margin", self.margin, "at least 0 and below 1")?;
        let start = self.start.map_or(1, |start| start.micro_batch);
        let in_batch = (1..=self.effective_batch).contains(&start);
        let expected = "at least 1 and at most the effective batch";
        AccumError::unless(in_batch, "start.micro_batch", start as f64, expected)?;
        Ok(())
    }

    /// What a trial may use: the limit without the margin.
    pub fn usable_bytes(&self) -> u64 {
        (self.limit_bytes as f64 * (1.0 - self.margin)) as u64
    }

    /// The smallest limit under which `bytes` may be used.
    pub(crate) fn limit_for(&self, bytes: u64) -> u64 {
        let mut search = Self {
            limit_bytes: (bytes as f64 / (1.0 - self.margin)) as u64,
            ..*self
        };
        while search.usable_bytes() < bytes {
            search.limit_bytes += 1;
        }
        search.limit_bytes
    }

    /// The largest size up to `at_most` under which the effective batch is exact with this
    /// normalization.
    pub(crate) fn largest_allowed(&self, at_most: usize) -> usize {
        match self.normalization {
            Normalization::Mean => largest_divisor(self.effective_batch, at_most),
            Normalization::Sum | Normalization::Tokens => at_most.min(self.effective_batch),
        }
    }
}
