//! By epochs it is the training of Burn's Learner; burn-accum's tests have the windows.

use burn::optim::AdamWConfig;
use burn_update::Update;

use crate::equal::{EPOCHS, seeded, setup};
use crate::falling;
use crate::learner::{Stop, train};
use crate::model::bits;

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
