//! What a user sees.

use burn::{lr_scheduler::constant::ConstantLr, optim::SgdConfig, train::Learner};
use burn_accum::{AccumConfig, AccumProgress, AccumulatingStrategy, MultiSteps};

use crate::{
    learner::{B, MICRO_BATCH, Setup, Stop, train, train_shown},
    model::{Model, rows},
    watch::Watch,
};

#[test]
fn micro_batches_and_updates_are_shown() {
    let _turn = crate::turn();
    let optimizer = MultiSteps::new(SgdConfig::new().init(), AccumConfig::mean(2)).unwrap();
    let strategy = AccumulatingStrategy::new(&optimizer.updates());
    let learner = Learner::new(Model::<B>::new(), optimizer, ConstantLr::new(0.1));
    let watch = Watch::default();
    let renderer = AccumProgress::new(watch.renderer());
    let setup = Setup::new(rows(0, 4 * MICRO_BATCH + 3), 2);
    let outcome = train_shown(learner, setup, Some(strategy.into()), watch, renderer);

    let shown = outcome.watch.shown("train: ");
    let expected = |epoch| {
        let counts = [(1, 0, 4), (2, 1, 8), (3, 1, 12), (4, 2, 16), (5, 2, 19)];
        counts.map(|(micro_batches, updates, items)| {
            format!(
                "Epoch {epoch}/2, Micro-batches {micro_batches}, Updates {updates}, Items {items}/19"
            )
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
    let optimizer = MultiSteps::new(SgdConfig::new().init(), AccumConfig::mean(2)).unwrap();
    let strategy = AccumulatingStrategy::new(&optimizer.updates());
    let mut setup = Setup::new(rows(0, 5 * MICRO_BATCH), 2);
    setup.summary = true;
    // Asks for a metric after each epoch, and so waits for the files that the summary is about.
    setup.stop = Some(Stop::NoImprovementSince(100));
    let scheduler = ConstantLr::new(0.1);
    let strategy = Some(strategy.into());
    let outcome = train(Model::<B>::new(), optimizer, scheduler, setup, strategy);
    let ended = outcome.watch.shown("ended, summary of epochs: ");
    assert_eq!(ended, ["Some(2)"]);
}
