//! Which sizes are tried. No burn import.
//!
//! Sizes are doubled, from one or from what an estimate says, until one does not fit, and then
//! halved in between. The largest sizes that fit determine a line, the fixed part and the bytes per
//! item: a size that it predicts not to fit is not tried, but the largest that it predicts to fit.
//! The size that is found was measured.
//!
//! Memory does not always grow linearly: from some size on a kernel takes a workspace, or
//! activations outgrow the optimizer's step. A line across such a size is too steep and would end
//! the search too early. So where a line is steeper than the one before it, a size between its two
//! ends is measured, which is known to fit. Under a byte budget for activations memory hardly
//! grows, and may fall a little: a size then counts with the peak of the smaller one.

use std::collections::BTreeMap;

use super::{
    MicroBatchSearch, Partition,
    report::{MicroBatchFound, Trial, TrialOutcome},
};
use crate::AccumError;

/// The search ends after this many trials, with the largest size that was measured to fit.
const MOST_TRIALS: usize = 40;

/// If a line is this many times steeper than the one before it, memory may jump between its ends.
const STEEPER: f64 = 1.25;

/// A size takes at least this part of what a smaller one takes; less means that the probe misses
/// peaks. It is below 1 because a byte budget for activations evicts other tensors with every size.
const LEAST: f64 = 0.5;

/// The measurement of a trial.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Measured {
    Peak(u64),
    Failed(String),
}

/// Finds the largest size that fits, trying sizes with `measure`.
pub(crate) fn run(
    search: &MicroBatchSearch,
    mut measure: impl FnMut(usize) -> Result<Measured, AccumError>,
) -> Result<MicroBatchFound, AccumError> {
    search.validate()?;
    let mut state = State::new(*search);
    let mut size = Some(search.start.map_or(1, |start| start.micro_batch));
    while let Some(micro_batch) = size {
        state.note(micro_batch, measure(micro_batch)?)?;
        size = match state.trials.len() {
            MOST_TRIALS.. => None,
            _ => state.next(),
        };
    }
    state.found()
}

/// What is known so far.
struct State {
    search: MicroBatchSearch,
    usable_bytes: u64,
    trials: Vec<Trial>,
    /// Peaks of the sizes that fit, each raised to at least those of smaller sizes.
    fits: BTreeMap<usize, u64>,
    /// The smallest size that does not fit, and its peak if it has one.
    too_large: Option<(usize, Option<u64>)>,
}

impl State {
    fn new(search: MicroBatchSearch) -> Self {
        Self {
            search,
            usable_bytes: search.usable_bytes(),
            trials: Vec::new(),
            fits: BTreeMap::new(),
            too_large: None,
        }
    }

    fn note(&mut self, micro_batch: usize, measured: Measured) -> Result<(), AccumError> {
        let outcome = match measured {
            Measured::Peak(peak_bytes) => {
                self.check_plausible(micro_batch, peak_bytes)?;
                match peak_bytes <= self.usable_bytes {
                    true => TrialOutcome::Fits { peak_bytes },
                    false => TrialOutcome::Exceeds { peak_bytes },
                }
            }
            Measured::Failed(reason) => TrialOutcome::Failed { reason },
        };
        match (&outcome, micro_batch) {
            (TrialOutcome::Fits { peak_bytes }, _) => {
                self.fits.insert(micro_batch, *peak_bytes);
                let mut most = 0;
                for peak_bytes in self.fits.values_mut() {
                    most = most.max(*peak_bytes);
                    *peak_bytes = most;
                }
            }
            (TrialOutcome::Exceeds { peak_bytes }, 1) => {
                return Err(AccumError::LimitTooSmall {
                    limit_bytes: self.search.limit_bytes,
                    needed_bytes: self.search.limit_for(*peak_bytes),
                    peak_bytes: *peak_bytes,
                    margin: self.search.margin,
                });
            }
            (TrialOutcome::Failed { reason }, 1) => {
                let reason = reason.clone();
                return Err(AccumError::StepFails { reason });
            }
            (TrialOutcome::Exceeds { .. } | TrialOutcome::Failed { .. }, _) => {
                self.too_large = Some((micro_batch, outcome.peak_bytes()));
                self.fits.retain(|&size, _| size < micro_batch);
            }
        }
        self.trials.push(Trial {
            micro_batch,
            outcome,
        });
        Ok(())
    }

    fn check_plausible(&self, micro_batch: usize, peak_bytes: u64) -> Result<(), AccumError> {
        let known = self.trials.iter().filter_map(|trial| {
            let peak_bytes = trial.outcome.peak_bytes()?;
            Some((trial.micro_batch, peak_bytes))
        });
        for other in known {
            let [smaller, larger] = match other.0 < micro_batch {
                true => [other, (micro_batch, peak_bytes)],
                false => [(micro_batch, peak_bytes), other],
            };
            if (larger.1 as f64) < smaller.1 as f64 * LEAST {
                return Err(AccumError::PeaksMissed {
                    smaller: smaller.0,
                    smaller_bytes: smaller.1,
                    larger: larger.0,
                    larger_bytes: larger.1,
                });
            }
        }
        Ok(())
    }

    /// The size to try; `None` where the largest that may fit is known to fit.
    fn next(&self) -> Option<usize> {
        if self.fits.is_empty() {
            return Some(self.smaller());
        }
        let (largest, _) = self.largest();
        match largest {
            1 if self.known_most() > 1 => return Some(2),
            2.. if self.line().is_none() => return Some(largest / 2),
            _ => {}
        }
        let goal = self.search.largest_allowed(self.predicted_most());
        if self.fits.contains_key(&goal) {
            let could_be_larger = goal < self.search.largest_allowed(self.known_most());
            return could_be_larger.then(|| self.doubtful()).flatten();
        }
        if goal < largest {
            return Some(goal);
        }
        let Some((too_large, _)) = self.too_large else {
            return Some(goal.min(largest.saturating_mul(2)));
        };
        let middle = largest.midpoint(too_large).max(largest + 1);
        let allowed = self.search.largest_allowed(middle.min(goal));
        // If no size above `largest` is allowed up to the middle, `goal` is left.
        Some(if allowed > largest { allowed } else { goal })
    }

    /// A smaller size, where all that were tried are too large: once by the estimate's bytes per
    /// item, then at most half, because the estimate may be far off.
    fn smaller(&self) -> usize {
        let (too_large, peak_bytes) = self.too_large.expect("a size was tried");
        let item_bytes = self.search.start.map_or(0, |start| start.item_bytes);
        let items = match peak_bytes {
            Some(peak_bytes) if item_bytes > 0 && self.trials.len() == 1 => {
                (peak_bytes - self.usable_bytes).div_ceil(item_bytes) as usize
            }
            _ => too_large / 2,
        };
        let size = too_large.saturating_sub(items).clamp(1, too_large - 1);
        self.search.largest_allowed(size)
    }

    /// The largest size that fits, and its peak.
    fn largest(&self) -> (usize, u64) {
        let (size, peak_bytes) = self.fits.last_key_value().expect("a size of one fits");
        (*size, *peak_bytes)
    }

    /// A size that fits, far enough below `larger` for a meaningful line through both.
    fn below(&self, larger: usize) -> Option<(usize, u64)> {
        let (size, bytes) = self.fits.range(..=far_below(larger)).next_back()?;
        Some((*size, *bytes))
    }

    /// The line through the largest size that fits and one below, or else the smallest that does
    /// not: fixed part and bytes per item. `None` with one size alone.
    fn line(&self) -> Option<(f64, f64)> {
        let largest = self.largest();
        let slope = match (self.below(largest.0), self.too_large) {
            (Some(low), _) => slope(low, largest),
            (None, Some((size, Some(peak_bytes)))) => slope(largest, (size, peak_bytes)),
            _ => return None,
        };
        Some((largest.1 as f64 - slope * largest.0 as f64, slope))
    }

    /// A size to measure in between if the line is steeper than the one before it.
    fn doubtful(&self) -> Option<usize> {
        let largest = self.largest();
        let low = self.below(largest.0)?;
        let before = self.below(low.0)?;
        let is_steeper = slope(low, largest) > STEEPER * slope(before, low);
        let middle = low.0 + (largest.0 - low.0) / 2;
        let is_new = middle > low.0 && middle <= far_below(largest.0);
        (is_steeper && is_new).then_some(middle)
    }

    /// The largest size that is not known not to fit.
    fn known_most(&self) -> usize {
        let below = self.too_large.map(|(size, _)| size - 1);
        below.unwrap_or(self.search.effective_batch)
    }

    /// The largest size that is neither known nor predicted not to fit.
    fn predicted_most(&self) -> usize {
        let (largest, bytes) = self.largest();
        let most = self.known_most();
        let Some((_, slope)) = self.line() else {
            return largest;
        };
        // A line that does not rise sets no limit: the quotient is infinite or NaN.
        let more = (self.usable_bytes - bytes) as f64 / slope;
        match more.is_finite() {
            true => most.min(largest.saturating_add(more as usize)),
            false => most,
        }
    }

    fn found(self) -> Result<MicroBatchFound, AccumError> {
        let sizes = self.fits.keys().rev();
        let mut allowed = sizes.filter(|size| self.search.largest_allowed(**size) == **size);
        let micro_batch = *allowed.next().expect("a size of one is always allowed");
        let (_, bytes) = self.largest();
        let (fixed_bytes, item_bytes) = self.line().unwrap_or((bytes as f64, 0.0));
        Ok(MicroBatchFound {
            search: self.search,
            partition: Partition::new(self.search.effective_batch, micro_batch)?,
            peak_bytes: self.fits[&micro_batch],
            largest_fitting: self.largest().0,
            fixed_bytes,
            item_bytes,
            trials: self.trials,
        })
    }
}

fn far_below(size: usize) -> usize {
    size - (size / 8).max(1)
}

/// Bytes per item between two sizes; 0 if the peak falls, which is noise.
fn slope(low: (usize, u64), high: (usize, u64)) -> f64 {
    high.1.saturating_sub(low.1) as f64 / (high.0 - low.0) as f64
}
