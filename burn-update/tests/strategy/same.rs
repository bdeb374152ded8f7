//! By epochs it is the training of Burn's Learner, and that of burn-accum's strategy.

use burn::optim::AdamWConfig;
use burn_accum::{AccumConfig, AccumulatingStrategy, MultiSteps};
use burn_update::Update;

use crate::equal::{EPOCHS, seeded, setup};
use crate::learner::{B, Outcome, Stop, train};
use crate::model::bits;
use crate::{falling, windows};

/// With dropout, shuffled: model, metrics, progress, events.
#[test]
fn without_windows_it_is_burns_training() {
    let _turn = crate::turn();
    for stop in [None, Some(Stop::After(2))] {
        let setup = || {
            let mut setup = setup();
            setup.stop = stop;
            setup
        };
        let update = || Update::new(AdamWConfig::new().init());
        let burns = train(seeded(), update(), falling(), setup(), None);
        let ours = update();
        let strategy = Some(ours.strategy().into());
        let ours = train(seeded(), ours, falling(), setup(), strategy);
        let epochs = stop.map_or(EPOCHS, |_| 2);
        assert_eq!(bits(&ours.model), bits(&burns.model));
        for epoch in 1..=epochs {
            let [ours, burns] = [&ours, &burns].map(|it| it.directory.records(epoch));
            assert_eq!((ours.0, ours.1), (burns.0, burns.1));
        }
        assert!(!ours.directory.is_recorded(epochs + 1));
        // `iteration` counts the updates that are made, of which each item is one.
        assert_eq!(ours.watch.lines(), burns.watch.lines());
    }
}

/// Windows of four micro-batches: an epoch of six ends with one of two.
#[test]
fn with_windows_it_is_the_training_of_an_accumulating_strategy() {
    let _turn = crate::turn();
    let adam = AdamWConfig::new().with_weight_decay(0.1).init();
    let wrapped = MultiSteps::new(adam, AccumConfig::mean(4)).unwrap();
    let strategy = AccumulatingStrategy::new(&wrapped.updates());
    let theirs: Outcome<B> = train(seeded(), wrapped, falling(), setup(), Some(strategy.into()));
    let update = windows(4);
    let progress = update.progress();
    let strategy = Some(update.strategy().into());
    let ours = train(seeded(), update, falling(), setup(), strategy);
    assert_eq!(progress.updates(), 2 * EPOCHS as u64);
    assert_eq!(ours.watch.lines(), theirs.watch.lines());
    assert_eq!(bits(&ours.model), bits(&theirs.model));
    assert_ne!(bits(&ours.model), bits(&seeded()));
    let (_, _, record) = theirs.directory.records(EPOCHS);
    assert_eq!(record["item"]["accumulated"]["tally"]["updates"], 6);
}
