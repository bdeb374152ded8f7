//! What cannot be trained is said before the first step.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn_update::UpdateError;

use crate::learner::{Setup, train};
use crate::model::{Model, rows};
use crate::{Strategy, falling, shuffled, trained, windows};

fn message(trained: impl FnOnce()) -> String {
    let panic = catch_unwind(AssertUnwindSafe(trained)).expect_err("it is refused");
    *panic.downcast::<String>().expect("a message")
}

fn refused(setup: Setup, how: impl FnOnce(Strategy) -> Strategy) -> String {
    message(|| drop(trained(&Model::new(), setup, how)))
}

#[test]
fn the_strategy_of_another_update() {
    let _turn = crate::turn();
    let strategy = windows(2).strategy();
    let message = message(|| {
        train(
            Model::new(),
            windows(2),
            falling(),
            shuffled(1),
            Some(strategy.into()),
        );
    });
    assert!(message.contains("made by another update"), "{message}");
    assert!(message.contains("Update<"), "{message}");
}

#[test]
fn burns_own_accumulation() {
    let _turn = crate::turn();
    let mut setup = shuffled(1);
    setup.burns_accumulation = Some(2);
    let message = refused(setup, |strategy| strategy);
    assert!(message.contains("AccumConfig::mean(2)"), "{message}");
}

#[test]
fn ranks_that_reduce_nothing() {
    let _turn = crate::turn();
    let message = refused(shuffled(1), |strategy| strategy.threads(2));
    assert!(message.contains("2 ranks"), "{message}");
}

#[test]
fn no_data_to_make_updates_of() {
    let _turn = crate::turn();
    let message = refused(Setup::new(Vec::new(), 1), |strategy| {
        strategy.until_updates(3)
    });
    assert!(message.contains("3 updates"), "{message}");
}

#[test]
fn an_interval_of_no_updates() {
    let strategy: Strategy = windows(2).strategy();
    let refused = strategy.validate_every(0).err().unwrap();
    assert!(
        matches!(refused, UpdateError::InvalidValue { value: 0.0, .. }),
        "{refused}"
    );
}

#[test]
fn a_record_of_more_data() {
    let _turn = crate::turn();
    let in_one = |strategy: Strategy| strategy.until_updates(3).validate_every(1).unwrap();
    let whole = trained(&Model::new(), shuffled(1), in_one);
    let mut less = Setup::new(rows(0, 8), 1);
    less.resume = Some((2, whole.directory.path().to_owned()));
    // After four micro-batches, and there are two.
    let message = refused(less, in_one);
    assert!(message.contains("after 4 batches of epoch 1"), "{message}");
    assert!(message.contains("only 2"), "{message}");
}
