//! What a user sees.

use burn::{lr_scheduler::constant::ConstantLr, optim::SgdConfig};
use burn_accum::AccumConfig;

use crate::{
    learner::{B, MICRO_BATCH, Setup, Stop, train},
    model::{Model, rows},
    windows::in_windows,
};

/// `iteration` counts the updates of the epoch before the item was shown.
#[test]
fn updates_are_shown() {
    let _turn = crate::turn();
    let update = in_windows(SgdConfig::new().init(), AccumConfig::mean(2)).update;
    let strategy = Some(update.strategy().into());
    let setup = Setup::new(rows(0, 4 * MICRO_BATCH + 3), 2);
    let scheduler = ConstantLr::new(0.1);
    let outcome = train(Model::<B>::new(), update, scheduler, setup, strategy);

    let shown = outcome.watch.shown("train: ");
    let expected = |epoch| {
        let counts = [(0, 4), (1, 8), (1, 12), (2, 16), (2, 19)];
        counts.map(|(updates, items)| {
            format!("Epoch {epoch}/2, Iteration {updates}, Items {items}/19")
        })
    };
    assert_eq!(shown, [expected(1), expected(2)].concat());

    // Validation has no windows.
    let shown = outcome.watch.shown("valid: ");
    assert_eq!(
        shown[..2],
        [
            "Epoch 1/2, Iteration 1, Items 4/6",
            "Epoch 1/2, Iteration 2, Items 6/6"
        ]
    );
}

#[test]
fn a_summary_ends_the_training() {
    let _turn = crate::turn();
    let update = in_windows(SgdConfig::new().init(), AccumConfig::mean(2)).update;
    let strategy = update.strategy();
    let mut setup = Setup::new(rows(0, 5 * MICRO_BATCH), 2);
    setup.summary = true;
    // Asks for a metric after each epoch, and so waits for the files that the summary is about.
    setup.stop = Some(Stop::NoImprovementSince(100));
    let scheduler = ConstantLr::new(0.1);
    let strategy = Some(strategy.into());
    let outcome = train(Model::<B>::new(), update, scheduler, setup, strategy);
    let ended = outcome.watch.shown("ended, summary of epochs: ");
    assert_eq!(ended, ["Some(2)"]);
}
