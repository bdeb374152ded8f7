//! It ends after so many updates, and is validated and recorded every so many.

use burn::optim::AdamWConfig;
use burn_amp::GradScalerConfig;
use burn_update::Update;

use crate::learner::{B, MICRO_BATCH, Setup, train};
use crate::model::{Model, bits, rows};
use crate::{falling, shuffled, trained};

/// Windows of two micro-batches: an epoch of six has three updates.
#[test]
fn it_ends_within_an_epoch() {
    let _turn = crate::turn();
    let start = Model::new();
    let four = trained(&start, shuffled(1), |strategy| strategy.until_updates(4));
    let items = four.watch.shown("item train: ").len();
    assert_eq!(items, 8); // a whole epoch and two micro-batches
    assert_eq!(
        four.watch.logged("end "),
        ["1 train", "1 valid", "2 train", "2 valid"]
    );
    assert!(four.directory.is_recorded(2) && !four.directory.is_recorded(3));

    // As the training by epochs that is longer, so far.
    let two = trained(&start, shuffled(2), |strategy| strategy);
    let metadata = |line: &String| line.split(" lr").next().unwrap().to_owned();
    let losses = |lines: Vec<String>| -> Vec<String> {
        let lines = lines.iter().filter(|line| line.contains("Loss"));
        lines.map(metadata).collect()
    };
    let all = losses(two.watch.logged("train "));
    assert_eq!(losses(four.watch.logged("train ")), all[..8]);
    assert_ne!(bits(&four.model), bits(&two.model));
}

/// An interval takes the place of an epoch in all that Burn shows and records.
#[test]
fn intervals_take_the_place_of_epochs() {
    let _turn = crate::turn();
    let start = Model::new();
    let whole = trained(&start, shuffled(1), |strategy| strategy.until_updates(10));
    let parts = trained(&start, shuffled(1), |strategy| {
        let strategy = strategy.until_updates(10);
        strategy.validate_every(4).unwrap()
    });
    // Neither validation nor records change it.
    assert_eq!(bits(&parts.model), bits(&whole.model));
    let ends = ["1", "2", "3"].map(|number| [format!("{number} train"), format!("{number} valid")]);
    assert_eq!(parts.watch.logged("end "), ends.concat());
    // 4, 4 and 2 updates of two micro-batches; each counts the updates before it was shown.
    let shown = parts.watch.shown("train: ");
    assert_eq!(shown.len(), 20);
    let counts = |line: &String| line.split(", Items").next().unwrap().to_owned();
    let shown: Vec<_> = shown.iter().map(counts).collect();
    assert_eq!(shown[0], "Epoch 1/3, Iteration 0");
    assert_eq!(shown[7], "Epoch 1/3, Iteration 4");
    assert_eq!(shown[8], "Epoch 2/3, Iteration 0");
    assert_eq!(shown[19], "Epoch 3/3, Iteration 2");
    assert_eq!(parts.watch.shown("valid: ").len(), 3 * 2);
    assert!(parts.directory.is_recorded(3) && !parts.directory.is_recorded(4));
}

/// Without an end by updates the last interval ends with the data of the last epoch.
#[test]
fn intervals_of_epochs_end_with_the_data() {
    let _turn = crate::turn();
    let start = Model::new();
    // Three updates an epoch.
    for (interval, expected) in [(2, 3), (3, 2), (5, 2), (7, 1)] {
        let parts = trained(&start, shuffled(2), |strategy| {
            strategy.validate_every(interval).unwrap()
        });
        let ends = parts.watch.logged("end ").len();
        assert_eq!(ends, 2 * expected, "{interval}");
        assert_eq!(parts.watch.shown("train: ").len(), 12);
        let whole = trained(&start, shuffled(2), |strategy| strategy);
        assert_eq!(bits(&parts.model), bits(&whole.model));
    }
}

/// A micro-batch with a gradient that is not finite is dropped under a scale: it makes the update
/// come later, and the training longer.
#[test]
fn what_is_skipped_is_not_counted() {
    let _turn = crate::turn();
    let shown = |bad: Option<usize>| {
        let update = Update::new(AdamWConfig::new().init());
        let update = update.scale(GradScalerConfig::default()).unwrap();
        let strategy = update.strategy().until_updates(4);
        let mut setup = Setup::new(rows(0, 8 * MICRO_BATCH), 1);
        if let Some(bad) = bad {
            setup.train[bad].weight = f32::INFINITY;
        }
        let schedule = update.per_update(falling());
        let progress = update.progress();
        let strategy = Some(strategy.into());
        let outcome = train(Model::<B>::new(), update, schedule, setup, strategy);
        assert_eq!(progress.updates(), 4);
        let items = outcome.watch.shown("item train: ").len();
        (items, outcome.watch.learning_rates())
    };
    let (items, rates) = shown(None);
    assert_eq!(items, 4);
    let (items, longer) = shown(Some(MICRO_BATCH + 1));
    assert_eq!(items, 5);
    // The schedule waits, too.
    assert_eq!(longer, [rates[0], rates[1], rates[1], rates[2], rates[3]]);
}

/// A clone counts for itself and begins with the first batch, also after another has been trained.
#[test]
fn a_clone_trains_from_its_own_beginning() {
    let _turn = crate::turn();
    let (start, update) = (Model::new(), crate::windows(2));
    let run = || {
        let own = update.clone();
        let strategy = own.strategy().until_updates(4);
        let strategy = Some(strategy.into());
        train(start.clone(), own, falling(), shuffled(1), strategy)
    };
    let (first, second) = (run(), run());
    assert_eq!(second.watch.shown("item train: ").len(), 8);
    assert_eq!(bits(&second.model), bits(&first.model));
}
