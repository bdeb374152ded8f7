//! What a search is refused for, and what it says is needed.

use burn_accum::{AccumError, EstimatedStart, MicroBatchSearch};

use crate::search::search;

#[test]
fn impossible_ones_are_refused() {
    let search = MicroBatchSearch::new(8, 100);
    let starting_at = |micro_batch| MicroBatchSearch {
        start: Some(EstimatedStart {
            micro_batch,
            item_bytes: 1,
        }),
        ..search
    };
    for (wrong, name) in [
        (MicroBatchSearch::new(0, 100), "effective_batch = 0"),
        (MicroBatchSearch::new(8, 0), "limit_bytes = 0"),
        (search.with_margin(-0.1), "margin = -0.1"),
        (search.with_margin(f64::NAN), "margin = NaN"),
        (starting_at(0), "start.micro_batch = 0"),
        (starting_at(9), "start.micro_batch = 9"),
    ] {
        assert!(
            wrong
                .validate()
                .is_err_and(|error| error.to_string().starts_with(name)),
            "{name}"
        );
    }
}

#[test]
fn the_limit_that_is_named_is_the_smallest() {
    for bytes in [1, 19, 20, 951, 1 << 40] {
        let error = search(MicroBatchSearch::new(8, 1), usize::MAX, |_| bytes);
        let Err(AccumError::LimitTooSmall { needed_bytes, .. }) = error else {
            panic!("{error:?}");
        };
        let with = |limit| MicroBatchSearch::new(8, limit).usable_bytes();
        assert!(
            with(needed_bytes) >= bytes && with(needed_bytes - 1) < bytes,
            "{bytes}"
        );
    }
}
