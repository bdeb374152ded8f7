//! Which sizes are tried. No burn import.
//!
//! Sizes one to three come first. The largest sizes that fit determine a line: the fixed part and the bytes per item. The line
//! predicts the next size, at most four times the largest that fits, so that little is extrapolated; each trial updates the line.
//! Once a size did not fit, the search continues between it and the largest that did. A size that is predicted not to fit is not
//! tried, and the size that is found was measured.
//!
//! With an estimate the first size is the one that it says, and half of it the second: the line through both is measured.
//!
//! Memory does not always grow linearly: from some size on a kernel takes a workspace, or activations outgrow the optimizer's step. A
//! line across such a size is too steep and would end the search too early. So where a line is steeper than the one before it, a size
//! between its two ends is measured, which is known to fit. Under a byte budget for activations memory hardly grows, and may fall a
//! little: a size then counts with the peak of the smaller one.

use std::collections::BTreeMap;

use super::{
    FindError, MicroBatchSearch, Partition,
    report::{MicroBatchFound, Trial, TrialOutcome},
};

/// The search ends after this many trials, with the largest size that was measured to fit.
pub(crate) const MOST_TRIALS: usize = 32;

/// Sizes up to this one are tried without a line.
const PROBES: usize = 3;

/// How many times larger than the largest that fits the next size may be, if the line rises. The second constant is for a line that
/// does not rise yet, because the optimizer's step takes more than the activations.
const GROWTH: usize = 4;
const GROWTH_WITHOUT_RISE: usize = 2;

/// If a line is this many times steeper than the one before it, memory may jump between its ends.
const STEEPER: f64 = 1.25;

/// A size takes at least this part of what a smaller one takes; less means that the probe misses peaks. It is below 1 because a byte
/// budget for activations evicts other tensors with every size.
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
    mut measure: impl FnMut(usize) -> Result<Measured, FindError>,
) -> Result<MicroBatchFound, FindError> {
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
    /// Whether the next size between the two is their middle.
    halve: bool,
}

impl State {
    fn new(search: MicroBatchSearch) -> Self {
        Self {
            search,
            usable_bytes: search.usable_bytes(),
            trials: Vec::new(),
            fits: BTreeMap::new(),
            too_large: None,
            halve: false,
        }
    }

    fn note(&mut self, micro_batch: usize, measured: Measured) -> Result<(), FindError> {
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
                return Err(FindError::LimitTooSmall {
                    limit_bytes: self.search.limit_bytes,
                    needed_bytes: self.search.limit_for(*peak_bytes),
                    peak_bytes: *peak_bytes,
                    margin: self.search.margin,
                });
            }
            (TrialOutcome::Failed { reason }, 1) => {
                let reason = reason.clone();
                return Err(FindError::StepFails { reason });
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

    fn check_plausible(&self, micro_batch: usize, peak_bytes: u64) -> Result<(), FindError> {
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
                return Err(FindError::PeaksMissed {
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
    fn next(&mut self) -> Option<usize> {
        if self.fits.is_empty() {
            return Some(self.smaller());
        }
        let (largest, _) = self.largest();
        let (is_guided, most) = (self.search.start.is_some(), self.known_most());
        match largest {
            _ if !is_guided && largest < PROBES.min(most) => return Some(largest + 1),
            1 if is_guided && most > 1 => return Some(2),
            2.. if is_guided && self.line().is_none() => return Some(largest / 2),
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
        match self.too_large {
            None => {
                let rises = self.line().is_some_and(|(_, slope)| slope > 0.0);
                let growth = if rises { GROWTH } else { GROWTH_WITHOUT_RISE };
                Some(goal.min(largest.saturating_mul(growth)))
            }
            Some((too_large, peak_bytes)) => {
                let between = self.between(too_large, peak_bytes);
                let allowed = self.search.largest_allowed(between.min(goal));
                // If no size above `largest` is allowed up to `between`, `goal` is left.
                Some(if allowed > largest { allowed } else { goal })
            }
        }
    }

    /// A smaller size, where all that were tried are too large: by the estimate's bytes per item, or half.
    fn smaller(&self) -> usize {
        let (too_large, peak_bytes) = self.too_large.expect("a size was tried");
        let item_bytes = self.search.start.map_or(0, |start| start.item_bytes);
        let items = match peak_bytes {
            Some(peak_bytes) if item_bytes > 0 => {
                (peak_bytes - self.usable_bytes).div_ceil(item_bytes) as usize
            }
            _ => too_large / 2,
        };
        let size = too_large.saturating_sub(items).clamp(1, too_large - 1);
        self.search.largest_allowed(size)
    }

    /// A size between the largest that fits and the smallest that does not: in turns where a line between the two meets
    /// what is usable, and the middle, which bounds the number of trials.
    fn between(&mut self, too_large: usize, peak_bytes: Option<u64>) -> usize {
        let (largest, bytes) = self.largest();
        let middle = largest + (too_large - largest) / 2;
        self.halve = !self.halve;
        match peak_bytes {
            Some(peak_bytes) if self.halve => {
                let slope = (peak_bytes - bytes) as f64 / (too_large - largest) as f64;
                let meets = largest + ((self.usable_bytes - bytes) as f64 / slope) as usize;
                meets.clamp(largest + 1, too_large - 1)
            }
            _ => middle.max(largest + 1),
        }
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

    /// The line through the largest size that fits and one below, or else the smallest that does not: fixed part and bytes per item.
    /// `None` with one size alone.
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

    fn found(self) -> Result<MicroBatchFound, FindError> {
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::Normalization;

    /// Peaks by a function of the size; from some size on the step fails.
    fn search(
        search: MicroBatchSearch,
        fails_from: usize,
        peak: impl Fn(usize) -> u64,
    ) -> Result<MicroBatchFound, FindError> {
        run(&search, |size| {
            Ok(match size >= fails_from {
                true => Measured::Failed("out of memory".to_owned()),
                false => Measured::Peak(peak(size)),
            })
        })
    }

    fn any_size(effective_batch: usize, limit_bytes: u64) -> MicroBatchSearch {
        MicroBatchSearch::new(effective_batch, limit_bytes)
            .with_normalization(Normalization::Tokens)
    }

    fn sizes(found: &MicroBatchFound) -> Vec<usize> {
        found.trials.iter().map(|trial| trial.micro_batch).collect()
    }

    #[test]
    fn a_line_is_followed_to_its_end_and_no_further() {
        let found = search(any_size(64, 1000), usize::MAX, |size| {
            100 + 30 * size as u64
        })
        .unwrap();
        // 950 usable: (950 - 100) / 30 = 28.3
        assert_eq!(sizes(&found), [1, 2, 3, 12, 28]);
        assert_eq!(found.partition, Partition::new(64, 28).unwrap());
        assert_eq!(found.partition.sizes().collect::<Vec<_>>(), [28, 28, 8]);
        assert_eq!((found.peak_bytes, found.largest_fitting), (940, 28));
        assert_eq!((found.fixed_bytes, found.item_bytes), (100.0, 30.0));
        assert!(found.predict_bytes(29) > found.search.usable_bytes());
    }

    #[test]
    fn a_mean_gets_a_divisor() {
        let peak = |size| 100 + 30 * size as u64;
        let found = search(MicroBatchSearch::new(64, 1000), usize::MAX, peak).unwrap();
        assert_eq!(
            (found.partition.micro_batch(), found.partition.steps()),
            (16, 4)
        );
        let prime = search(MicroBatchSearch::new(97, 1000), usize::MAX, peak).unwrap();
        assert_eq!(
            (prime.partition.micro_batch(), prime.partition.steps()),
            (1, 97)
        );
        assert!(
            prime.predicted_most() == 28,
            "what another normalization would allow"
        );
        let whole = search(MicroBatchSearch::new(97, 10_000), usize::MAX, peak).unwrap();
        assert_eq!(sizes(&whole), [1, 2, 3, 12, 48, 97]);
    }

    #[test]
    fn the_whole_batch_may_fit() {
        let found = search(any_size(24, 1 << 30), usize::MAX, |size| 5 * size as u64).unwrap();
        assert_eq!(
            (found.partition.micro_batch(), found.partition.steps()),
            (24, 1)
        );
        let one = search(any_size(1, 100), usize::MAX, |_| 7).unwrap();
        assert_eq!((sizes(&one), one.partition.steps()), (vec![1], 1));
    }

    #[test]
    fn the_second_size_may_be_too_large() {
        let found = search(any_size(24, 100), usize::MAX, |size| 50 * size as u64).unwrap();
        assert_eq!(
            (sizes(&found), found.partition.micro_batch()),
            (vec![1, 2], 1)
        );
        let failed = search(any_size(24, 100), 2, |size| 50 * size as u64).unwrap();
        assert_eq!(failed.partition.micro_batch(), 1);
        assert!(matches!(
            failed.trials[1].outcome,
            TrialOutcome::Failed { .. }
        ));
    }

    #[test]
    fn failures_are_closed_in_on() {
        // The probe says that there is much room, the device that there is not.
        for fails_from in 2..64 {
            let found =
                search(any_size(64, 1 << 20), fails_from, |size| 100 + size as u64).unwrap();
            assert_eq!(found.partition.micro_batch(), fails_from - 1);
            assert!(found.trials.len() <= 12, "{:?}", sizes(&found));
        }
    }

    #[test]
    fn a_step_in_memory_is_closed_in_on() {
        let step = |at: usize| move |size: usize| if size < at { 100 } else { 2000 };
        for at in 2..=64 {
            let found = search(any_size(64, 1000), usize::MAX, step(at)).unwrap();
            assert_eq!(found.partition.micro_batch(), at - 1);
            assert!(found.trials.len() <= 14, "{:?}", sizes(&found));
        }
    }

    #[test]
    fn a_workspace_does_not_end_the_search() {
        // From some size on a kernel keeps a workspace that is worth many items.
        for from in 1..40 {
            let peak = |size: usize| 1000 + 5 * size as u64 + if size < from { 0 } else { 400 };
            let found = search(any_size(600, 2000), usize::MAX, peak).unwrap();
            assert_eq!(
                found.partition.micro_batch(),
                100,
                "from {from}: {:?}",
                sizes(&found)
            );
            assert!(found.trials.len() <= 16, "{:?}", sizes(&found));
        }
    }

    #[test]
    fn activations_that_outgrow_the_optimizer_are_followed() {
        for optimizer in (0..850).step_by(17) {
            let peak = |size: usize| 100 + (7 * size as u64).max(optimizer);
            let found = search(any_size(600, 1000), usize::MAX, peak).unwrap();
            assert_eq!(found.partition.micro_batch(), 121, "{:?}", sizes(&found));
            assert!(found.trials.len() <= 18, "{:?}", sizes(&found));
        }
    }

    #[test]
    fn an_estimate_needs_at_most_three_trials() {
        let peak = |size: usize| 10_000 + 300 * size as u64;
        for normalization in [Normalization::Mean, Normalization::Tokens] {
            for limit in (11_000..40_000).step_by(700) {
                let plain = MicroBatchSearch::new(64, limit).with_normalization(normalization);
                let expected = search(plain, usize::MAX, peak).unwrap();
                for percent in [95, 98, 100, 102, 105] {
                    let guided = plain.starting_at(|size| peak(size) * percent / 100);
                    let found = search(guided, usize::MAX, peak).unwrap();
                    assert_eq!(found.partition, expected.partition, "{limit}, {percent} %");
                    assert!(found.trials.len() <= 3, "{limit}: {:?}", sizes(&found));
                }
            }
        }
    }

    #[test]
    fn a_wrong_estimate_costs_trials_only() {
        let peak = |size: usize| 100 + 30 * size as u64;
        for estimate in [0, 1, 20, 1000, 1_000_000] {
            for fails_from in [2, 5, usize::MAX] {
                let guided = any_size(64, 1000).starting_at(|size| estimate * size as u64);
                let found = search(guided, fails_from, peak).unwrap();
                assert_eq!(found.partition.micro_batch(), 28.min(fails_from - 1));
                assert!(found.trials.len() <= 16, "{:?}", sizes(&found));
            }
        }
    }

    #[test]
    fn a_limit_below_one_item_names_what_is_needed() {
        let error = search(any_size(8, 1000), usize::MAX, |size| 990 + 10 * size as u64);
        let Err(FindError::LimitTooSmall { needed_bytes, .. }) = error else {
            panic!("{error:?}");
        };
        assert_eq!(needed_bytes, 1053);
        let found = search(any_size(8, 1053), usize::MAX, |size| 990 + 10 * size as u64);
        assert_eq!(found.unwrap().partition.micro_batch(), 1);
        let less = search(any_size(8, 1052), usize::MAX, |size| 990 + 10 * size as u64);
        assert!(less.is_err());
        assert_eq!(
            search(any_size(8, 1000), 1, |_| 1),
            Err(FindError::StepFails {
                reason: "out of memory".to_owned()
            })
        );
    }

    #[test]
    fn memory_that_falls_to_less_than_half_is_refused() {
        let error = search(any_size(64, 1 << 20), usize::MAX, |size| 998 / size as u64);
        assert_eq!(
            error,
            Err(FindError::PeaksMissed {
                smaller: 1,
                smaller_bytes: 998,
                larger: 3,
                larger_bytes: 332
            })
        );
    }

    #[test]
    fn memory_that_a_budget_holds_flat_is_no_limit() {
        let found = search(any_size(64, 1000), usize::MAX, |size| match size % 3 {
            0 => 700,
            _ => 800,
        });
        let found = found.unwrap();
        assert_eq!(found.largest_fitting, 64);
        assert!(found.item_bytes >= 0.0, "{found:?}");
    }

    proptest! {
        #[test]
        fn whatever_peaks_do_nothing_above_a_size_that_exceeds_is_taken(
            peaks in proptest::collection::vec(500..1000_u64, 200),
        ) {
            let found = search(any_size(200, 900), usize::MAX, |size| match size {
                1 => 500,
                _ => peaks[size - 1],
            });
            let found = found.unwrap();
            let too_large = found.trials.iter().filter(|trial| {
                !matches!(trial.outcome, TrialOutcome::Fits { .. })
            });
            for trial in too_large {
                prop_assert!(trial.micro_batch > found.largest_fitting);
            }
        }

        #[test]
        fn what_is_found_fits_and_nothing_predicted_not_to_is_tried(
            effective in 1..3000_usize,
            limit in 100..100_000_u64,
            fixed in 0..5000_u64,
            item in 0..200_u64,
            step_at in 1..3000_usize,
            step in 0..20_000_u64,
            fails_from in 2..4000_usize,
            noise in 0.0..0.02_f64,
            even: bool,
        ) {
            let normalization = if even { Normalization::Mean } else { Normalization::Tokens };
            let request = MicroBatchSearch::new(effective, limit).with_normalization(normalization);
            let peak = |size: usize| {
                let bytes = fixed + item * size as u64 + if size >= step_at { step } else { 0 };
                let wobble = 1.0 + noise * ((size * 7919 % 13) as f64 / 12.0 - 0.5);
                (bytes.max(1) as f64 * wobble) as u64
            };
            match search(request, fails_from, peak) {
                Ok(found) => {
                    let size = found.partition.micro_batch();
                    prop_assert!(size < fails_from && peak(size) <= request.usable_bytes());
                    prop_assert!(found.peak_bytes <= limit);
                    prop_assert_eq!(found.partition.sizes().sum::<usize>(), effective);
                    prop_assert!(!even || found.partition.is_even());
                    prop_assert!(found.partition.config(normalization).is_ok());
                    prop_assert!(found.trials.len() <= MOST_TRIALS);
                    let mut tried = sizes(&found);
                    tried.sort_unstable();
                    tried.dedup();
                    prop_assert_eq!(tried.len(), found.trials.len(), "no size twice");
                    prop_assert!(tried.iter().all(|size| *size <= effective));
                    // A plain line is followed exactly, to the byte.
                    if noise < 1e-9 && step == 0 {
                        let most = (1..=effective.min(fails_from - 1)).rev().find(|size| {
                            request.largest_allowed(*size) == *size && peak(*size) <= request.usable_bytes()
                        });
                        prop_assert_eq!(Some(size), most);
                    }
                }
                Err(FindError::LimitTooSmall { needed_bytes, .. }) => {
                    prop_assert!(needed_bytes > limit);
                }
                Err(error) => prop_assert!(false, "{}", error),
            }
        }

        #[test]
        fn a_line_is_followed_exactly(
            effective in 1..100_000_usize,
            limit in 1000..10_000_000_u64,
            fixed in 1..900_u64,
            item in 0..2000_u64,
            even: bool,
        ) {
            let normalization = if even { Normalization::Mean } else { Normalization::Tokens };
            let request = MicroBatchSearch::new(effective, limit).with_normalization(normalization);
            let peak = |size: usize| fixed + item * size as u64;
            let Ok(found) = search(request, usize::MAX, peak) else {
                prop_assert!(peak(1) > request.usable_bytes());
                return Ok(());
            };
            let most = (request.usable_bytes() - fixed).checked_div(item).map_or(effective, |most| most as usize);
            let most = request.largest_allowed(most.min(effective));
            prop_assert_eq!(found.partition.micro_batch(), most);
            for trial in found.trials.iter().skip(PROBES) {
                prop_assert!(peak(trial.micro_batch) <= request.usable_bytes(), "predicted not to fit");
            }
            // What does not rise is doubled, what rises by a line is met at once.
            let trials = if item == 0 { PROBES + most.ilog2() as usize + 1 } else { 12 };
            prop_assert!(found.trials.len() <= trials);
        }
    }
}
