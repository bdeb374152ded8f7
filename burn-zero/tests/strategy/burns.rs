//! With one rank it is Burn's own training, bit for bit.

use std::sync::Arc;

use burn::optim::AdamWConfig;
use burn_zero::{SingleRank, Stage, ZeroStrategy};

use crate::equal::{EPOCHS, assert_same, seeded, setup};
use crate::learner::{B, Outcome, Setup, Stop, train};
use crate::model::bits;
use crate::{adamw, falling};

/// The one rank of a strategy of threads, or a process.
#[derive(Clone, Copy)]
enum Rank {
    Thread,
    Process,
}

fn ours(rank: Rank, stage: Stage, setup: Setup) -> Outcome<B> {
    let strategy = match rank {
        Rank::Thread => ZeroStrategy::threads(1),
        Rank::Process => ZeroStrategy::process(Arc::new(SingleRank::new())),
    };
    let strategy = Some(strategy.into());
    train(seeded(), adamw::<B>(stage), falling(), setup, strategy)
}

fn burns(setup: Setup) -> Outcome<B> {
    train(seeded(), AdamWConfig::new().init(), falling(), setup, None)
}

#[test]
fn everything_is_the_same() {
    let _turn = crate::turn();
    let expected = burns(setup());
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
    assert_same(&ours, &burns(early()), 2);
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
        assert_same(&ours, &burns(interrupted()), recorded);
        let message = ours.interrupter.get_message();
        assert_eq!(message.as_deref(), Some("there it is"));
    }
}

#[test]
fn it_is_resumed_from_burns_records_and_burn_from_its() {
    let _turn = crate::turn();
    let resumed = |from: &Outcome<B>| {
        let mut setup = setup();
        setup.resume = Some((2, from.directory.path().to_owned()));
        setup
    };
    let first = ours(Rank::Thread, Stage::Gradients, setup());
    let expected = burns(resumed(&burns(setup())));
    for outcome in [
        burns(resumed(&first)),
        ours(
            Rank::Thread,
            Stage::OptimizerState,
            resumed(&burns(setup())),
        ),
    ] {
        assert_eq!(bits(&outcome.model), bits(&expected.model));
        assert_eq!(outcome.directory.records(3), expected.directory.records(3));
    }
}
