//! Which sizes are tried, by the peaks that they have.

use std::sync::atomic::{AtomicU64, Ordering};

use burn_accum::{
    AccumError, MicroBatchFound, MicroBatchSearch, Normalization, Partition, PeakCounter,
    TrialOutcome, find_micro_batch,
};
use burn_flex::Flex;
use proptest::prelude::*;

/// As the pages say.
const MOST_TRIALS: usize = 40;

/// Sizes up to this one are tried without a line.
const PROBES: usize = 2;

/// Peaks by a function of the size; from some size on the step fails.
pub fn search(
    search: MicroBatchSearch,
    fails_from: usize,
    peak: impl Fn(usize) -> u64,
) -> Result<MicroBatchFound, AccumError> {
    let in_use = AtomicU64::new(0);
    let mut probe = PeakCounter::new(
        || in_use.store(0, Ordering::Relaxed),
        || in_use.load(Ordering::Relaxed),
    );
    let step = |size: usize| {
        in_use.store(peak(size), Ordering::Relaxed);
        match size >= fails_from {
            true => Err("out of memory"),
            false => Ok(()),
        }
    };
    find_micro_batch::<Flex, _>(&search, &Default::default(), &mut probe, step)
}

/// The largest size up to `at_most` that keeps the effective batch exact.
fn largest_allowed(search: &MicroBatchSearch, at_most: usize) -> usize {
    let at_most = at_most.min(search.effective_batch);
    match search.normalization {
        Normalization::Mean => (1..=at_most)
            .rfind(|size| search.effective_batch.is_multiple_of(*size))
            .unwrap(),
        _ => at_most,
    }
}

fn any_size(effective_batch: usize, limit_bytes: u64) -> MicroBatchSearch {
    MicroBatchSearch::new(effective_batch, limit_bytes).with_normalization(Normalization::Tokens)
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
    assert_eq!(sizes(&found), [1, 2, 4, 8, 16, 28]);
    assert_eq!(found.partition, Partition::new(64, 28).unwrap());
    assert_eq!(found.partition.sizes().collect::<Vec<_>>(), [28, 28, 8]);
    assert_eq!((found.peak_bytes, found.largest_fitting), (940, 28));
    assert_eq!((found.fixed_bytes, found.item_bytes), (100.0, 30.0));
    assert_eq!(found.predicted_most(), 28);
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
    assert_eq!(sizes(&whole), [1, 2, 4, 8, 16, 32, 64, 97]);
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
        let found = search(any_size(64, 1 << 20), fails_from, |size| 100 + size as u64).unwrap();
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

/// Each step down by the estimate's bytes per item would be a hundredth of what is needed.
#[test]
fn an_estimate_without_the_fixed_part_costs_trials_only() {
    let search_from = any_size(1000, 51_010).with_margin(0.0);
    let guided = search_from.starting_at(|size| 1010 + 100 * size as u64);
    assert_eq!(guided.start.unwrap().micro_batch, 500);
    let found = search(guided, usize::MAX, |size| 51_000 + size as u64).unwrap();
    assert_eq!(found.partition.micro_batch(), 10);
    assert!(found.trials.len() <= 16, "{:?}", sizes(&found));
}

#[test]
fn a_limit_below_one_item_names_what_is_needed() {
    let error = search(any_size(8, 1000), usize::MAX, |size| 990 + 10 * size as u64);
    let Err(AccumError::LimitTooSmall { needed_bytes, .. }) = error else {
        panic!("{error:?}");
    };
    assert_eq!(needed_bytes, 1053);
    let found = search(any_size(8, 1053), usize::MAX, |size| 990 + 10 * size as u64);
    assert_eq!(found.unwrap().partition.micro_batch(), 1);
    let less = search(any_size(8, 1052), usize::MAX, |size| 990 + 10 * size as u64);
    assert!(less.is_err());
    assert_eq!(
        search(any_size(8, 1000), 1, |_| 1),
        Err(AccumError::StepFails {
            reason: "out of memory".to_owned()
        })
    );
}

#[test]
fn memory_that_falls_to_less_than_half_is_refused() {
    let error = search(any_size(64, 1 << 20), usize::MAX, |size| 998 / size as u64);
    assert_eq!(
        error,
        Err(AccumError::PeaksMissed {
            smaller: 1,
            smaller_bytes: 998,
            larger: 4,
            larger_bytes: 249
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
                        largest_allowed(&request, *size) == *size && peak(*size) <= request.usable_bytes()
                    });
                    prop_assert_eq!(Some(size), most);
                }
            }
            Err(AccumError::LimitTooSmall { needed_bytes, .. }) => {
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
        let most = largest_allowed(&request, most);
        prop_assert_eq!(found.partition.micro_batch(), most);
        for trial in found.trials.iter().skip(PROBES) {
            prop_assert!(peak(trial.micro_batch) <= request.usable_bytes(), "predicted not to fit");
        }
        prop_assert!(found.trials.len() <= PROBES + most.ilog2() as usize);
    }
}
