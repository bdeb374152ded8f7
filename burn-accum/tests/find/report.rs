//! What is printed of a search.

use burn_accum::{
    AccumConfig, MicroBatchFound, MicroBatchSearch, Normalization, Partition, Trial, TrialOutcome,
};

fn found(normalization: Normalization, micro_batch: usize) -> MicroBatchFound {
    let trial = |micro_batch, outcome| Trial {
        micro_batch,
        outcome,
    };
    let fits = |mebibytes: u64| TrialOutcome::Fits {
        peak_bytes: mebibytes << 20,
    };
    let reason = "out of memory\nat line 3".to_owned();
    MicroBatchFound {
        search: MicroBatchSearch::new(10, 100 << 20).with_normalization(normalization),
        partition: Partition::new(10, micro_batch).unwrap(),
        peak_bytes: 80 << 20,
        largest_fitting: 4,
        fixed_bytes: f64::from(40 << 20),
        item_bytes: f64::from(10 << 20),
        trials: vec![
            trial(1, fits(50)),
            trial(2, fits(60)),
            trial(7, TrialOutcome::Failed { reason }),
            trial(
                5,
                TrialOutcome::Exceeds {
                    peak_bytes: 96 << 20,
                },
            ),
            trial(4, fits(80)),
        ],
    }
}

#[test]
fn the_table_has_every_trial() {
    assert_eq!(
        found(Normalization::Tokens, 4).to_string(),
        "effective batch 10 below 100.0 MiB, 5 % of it free\n\
         micro-batch          peak  of limit\n\
         \x20         1      50.0 MiB    50.0 %  fits\n\
         \x20         2      60.0 MiB    60.0 %  fits\n\
         \x20         7                          failed: out of memory\n\
         \x20         5      96.0 MiB    96.0 %  too much\n\
         \x20         4      80.0 MiB    80.0 %  fits\n\
         fixed part 40.0 MiB, an item 10.0 MiB\n\
         window: 3 x 4, the last of 2\n"
    );
    let mean = found(Normalization::Mean, 2).to_string();
    let end = "window: 5 x 2\nup to 4 would fit, but do not divide 10: for that use Normalization::Tokens, or another \
               effective batch\n";
    assert!(mean.ends_with(end), "{mean}");
}

#[test]
fn a_partition_by_hand_is_checked() {
    assert!(found(Normalization::Mean, 4).config().is_err());
    assert_eq!(
        found(Normalization::Tokens, 4).config(),
        Ok(AccumConfig::tokens(3))
    );
}
