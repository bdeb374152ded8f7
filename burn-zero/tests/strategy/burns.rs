//! With one rank it is Burn's own training, bit for bit.

use std::sync::Arc;

use burn::optim::AdamWConfig;
use burn_zero::{SingleRank, Stage};

use crate::equal::{EPOCHS, assert_same, seeded, setup};
use crate::learner::{B, Outcome, Setup, Stop, train};
use crate::model::bits;
use crate::{adamw, falling, without_ranks};

/// The one rank of a strategy of threads, or a process.
#[derive(Clone, Copy)]
enum Rank {
    Thread,
    Process,
}

fn ours(rank: Rank, stage: Stage, setup: Setup) -> Outcome<B> {
    let update = adamw::<B>(stage);
    let strategy = match rank {
        Rank::Thread => update.strategy().threads(1),
        Rank::Process => update.strategy().process(Arc::new(SingleRank::new())),
    };
    let strategy = Some(strategy.into());
    train(seeded(), update, falling(), setup, strategy)
}

/// An update without ranks, after the check that its training is Burn's own loop's. The optimizer's
/// record is an update's.
fn burns(setup: impl Fn() -> Setup, epochs: usize) -> Outcome<B> {
    let burns = train(
        seeded(),
        AdamWConfig::new().init(),
        falling(),
        setup(),
        None,
    );
    let update = without_ranks(&seeded(), setup());
    assert_eq!(update.watch.lines(), burns.watch.lines());
    assert_eq!(bits(&update.model), bits(&burns.model));
    for epoch in 1..=epochs {
        let [ours, burns] = [&update, &burns].map(|it| it.directory.records(epoch));
        assert_eq!((ours.0, ours.1), (burns.0, burns.1));
    }
    update
}

#[test]
fn everything_is_the_same() {
    let _turn = crate::turn();
    let expected = burns(setup, EPOCHS);
    assert_eq!(expected.watch.shown("train: ").len(), EPOCHS * 6);
    assert_ne!(bits(&expected.model), bits(&seeded()));
    for stage in crate::STAGES {
        let threads = ours(Rank::Thread, stage, setup());
        assert_same(&threads, &expected, EPOCHS);
    }
    let process = ours(Rank::Process, Stage::Gradients, setup());
    assert_same(&process, &expected, EPOCHS);
}

#[test]
fn it_stops_early_at_the_same_epoch() {
    let _turn = crate::turn();
    let early = || {
        let mut setup = setup();
        setup.stop = Some(Stop::After(2));
        setup
    };
    let ours = ours(Rank::Thread, Stage::OptimizerState, early());
    assert_same(&ours, &burns(early, 2), 2);
}

#[test]
fn it_is_interrupted_in_the_same_way() {
    let _turn = crate::turn();
    // In the second epoch of training, and in the first validation, after which Burn begins another
    // epoch.
    for (at, recorded) in [(9, 0), (1001, 1)] {
        let interrupted = || {
            let mut setup = setup();
            setup.interrupt_at = Some(at);
            setup
        };
        let ours = ours(Rank::Thread, Stage::Gradients, interrupted());
        assert_same(&ours, &burns(interrupted, recorded), recorded);
        let message = ours.interrupter.get_message();
        assert_eq!(message.as_deref(), Some("there it is"));
    }
}

#[test]
fn it_is_resumed_from_records_without_ranks_and_those_from_its() {
    let _turn = crate::turn();
    let resumed = |from: &Outcome<B>| {
        let mut setup = setup();
        setup.resume = Some((2, from.directory.path().to_owned()));
        setup
    };
    let first = ours(Rank::Thread, Stage::Gradients, setup());
    let without = without_ranks(&seeded(), setup());
    let expected = without_ranks(&seeded(), resumed(&without));
    for outcome in [
        without_ranks(&seeded(), resumed(&first)),
        ours(Rank::Thread, Stage::OptimizerState, resumed(&without)),
    ] {
        assert_eq!(bits(&outcome.model), bits(&expected.model));
        assert_eq!(outcome.directory.records(3), expected.directory.records(3));
    }
}
