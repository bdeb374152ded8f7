//! A training that is resumed within an epoch is one that was never stopped.

use burn::tensor::backend::Backend;
use burn_flex::{Flex, FlexDevice};
use burn_update::EpochTail;

use crate::learner::{B, Outcome, Setup};
use crate::model::{Model, bits};
use crate::{shuffled, trained_in};

/// Windows of four micro-batches, of which an epoch has six.
const WINDOW: usize = 4;
const UPDATES: u64 = 10;

/// How an epoch ends, and the updates between two records. They are made within epochs, and by the
/// update that ends one.
const CASES: [(EpochTail, usize); 3] = [
    (EpochTail::Apply, 3),
    (EpochTail::Carry, 2),
    (EpochTail::Carry, 3),
];

fn run(start: &Model<B>, setup: Setup, (tail, interval): (EpochTail, usize)) -> Outcome<B> {
    trained_in(WINDOW, start, setup, |strategy| {
        let strategy = strategy.until_updates(UPDATES).with_tail(tail);
        strategy.with_seed(11).validate_every(interval).unwrap()
    })
}

/// With another generator, and a model that is another one until the record is loaded.
fn resumed(from: usize, whole: &Outcome<B>, case: (EpochTail, usize)) -> Outcome<B> {
    Flex::seed(&FlexDevice, 1000 + from as u64);
    let fresh = Model::lazy(0.5, &FlexDevice);
    let mut setup: Setup = shuffled(1);
    setup.resume = Some((from, whole.directory.path().to_owned()));
    run(&fresh, setup, case)
}

fn dropping() -> Model<B> {
    let mut model = Model::new();
    model.dropout.prob = 0.5;
    model
}

/// From every record: shuffled data, windows, dropout, AdamW and a schedule.
#[test]
fn within_an_epoch_it_goes_on_with_the_next_batch() {
    let _turn = crate::turn();
    for case in CASES {
        let whole = run(&dropping(), shuffled(1), case);
        let records = (UPDATES as usize).div_ceil(case.1);
        let shown = whole.watch.shown("item train: ");
        let numbered = whole.watch.shown("train: ");
        for from in 1..records {
            let resumed = resumed(from, &whole, case);
            assert_eq!(bits(&resumed.model), bits(&whole.model), "{case:?} {from}");
            for record in from + 1..=records {
                let [resumed, whole] = [&resumed, &whole].map(|it| it.directory.records(record));
                assert_eq!((resumed.0, resumed.1), (whole.0, whole.1));
            }
            // It shows the rest: as many items, in the same places of the same epochs.
            let is_before = |line: &&String| {
                (1..=from).any(|number| line.starts_with(&format!("Epoch {number}/")))
            };
            let before = numbered.iter().filter(is_before).count();
            assert!(before > 0 && before < shown.len());
            assert_eq!(resumed.watch.shown("item train: "), shown[before..]);
        }
    }
}

/// The test above sees what it should: another order of the data, or other masks, are another
/// model.
#[test]
fn order_and_masks_matter() {
    let _turn = crate::turn();
    let case = CASES[0];
    let whole = run(&dropping(), shuffled(1), case);
    let without = run(&Model::new(), shuffled(1), case);
    assert_ne!(bits(&without.model), bits(&whole.model));
    let mut setup = shuffled(1);
    setup.shuffle = Some(4);
    let other = run(&dropping(), setup, case);
    assert_ne!(bits(&other.model), bits(&whole.model));
    let other = trained_in(WINDOW, &dropping(), shuffled(1), |strategy| {
        strategy.until_updates(UPDATES).with_seed(12)
    });
    assert_ne!(bits(&other.model), bits(&whole.model));
    // And the seed is what makes them the same.
    let again = trained_in(WINDOW, &dropping(), shuffled(1), |strategy| {
        strategy.until_updates(UPDATES).with_seed(11)
    });
    assert_eq!(bits(&again.model), bits(&whole.model));
}

/// One that has reached its end makes no further step.
#[test]
fn a_training_that_has_ended_returns_its_model() {
    let _turn = crate::turn();
    let case = CASES[0];
    let whole = run(&dropping(), shuffled(1), case);
    let again = resumed((UPDATES as usize).div_ceil(case.1), &whole, case);
    assert_eq!(bits(&again.model), bits(&whole.model));
    assert!(again.watch.shown("train: ").is_empty());
}

/// A record of the last batch of an epoch: that epoch has been closed, and is not closed again.
#[test]
fn an_epoch_that_has_ended_is_not_validated_again() {
    let _turn = crate::turn();
    let start = Model::new();
    // Three updates an epoch.
    let six = trained_in(2, &start, shuffled(1), |strategy| strategy.until_updates(6));
    assert_eq!(six.watch.logged("end ").len(), 4);
    let mut setup = shuffled(1);
    setup.resume = Some((2, six.directory.path().to_owned()));
    let nine = trained_in(2, &start, setup, |strategy| strategy.until_updates(9));
    assert_eq!(nine.watch.logged("end "), ["3 train", "3 valid"]);
    assert_eq!(nine.watch.shown("item train: ").len(), 6);
}

/// A record of a training by epochs of another optimizer says no place within the data.
#[test]
#[should_panic(expected = "record 1 does not say where its training was in the data")]
fn a_record_without_a_place_is_not_resumed_by_updates() {
    let _turn = crate::turn();
    let start = Model::new();
    let whole = crate::learner::train(
        start.clone(),
        crate::windows(2),
        crate::falling(),
        shuffled(1),
        None,
    );
    let mut setup = shuffled(1);
    setup.resume = Some((1, whole.directory.path().to_owned()));
    trained_in(2, &start, setup, |strategy| strategy.until_updates(9));
}
