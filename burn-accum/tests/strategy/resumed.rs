//! A training that is resumed is one that was never stopped.

use burn::{lr_scheduler::linear::LinearLrSchedulerConfig, optim::AdamWConfig};
use burn_accum::{AccumConfig, EpochTail};

use crate::{
    learner::{B, MICRO_BATCH, Outcome, Setup, train},
    model::{Model, Row, bits, rows},
    windows::{in_windows, recorded},
};

const EPOCHS: usize = 4;

/// How to train; `None` as Burn does.
fn run(
    start: &Model<B>,
    how: Option<EpochTail>,
    epochs: usize,
    from: Option<(usize, &Outcome<B>)>,
) -> Outcome<B> {
    // 7 micro-batches.
    let data = rows(0, 6 * MICRO_BATCH + 1);
    run_on(data, start, how, epochs, from)
}

fn run_on(
    data: Vec<Row>,
    start: &Model<B>,
    how: Option<EpochTail>,
    epochs: usize,
    from: Option<(usize, &Outcome<B>)>,
) -> Outcome<B> {
    let update = in_windows(AdamWConfig::new().init(), AccumConfig::mean(4)).update;
    let falling = LinearLrSchedulerConfig::new(0.1, 0.0, 20).init().unwrap();
    let scheduler = update.per_update(falling);
    let strategy = how.map(|tail| update.strategy().with_tail(tail).into());
    let mut setup = Setup::new(data, epochs);
    setup.resume = from.map(|(epoch, outcome)| (epoch, outcome.directory.path().to_owned()));
    train(start.clone(), update, scheduler, setup, strategy)
}

/// From every epoch, in the middle of a window too where windows are carried over.
#[test]
fn it_continues_from_any_record() {
    let _turn = crate::turn();
    for tail in [EpochTail::Apply, EpochTail::Carry] {
        let start = Model::new();
        let whole = run(&start, Some(tail), EPOCHS, None);
        for stop in 1..EPOCHS {
            // The model is another one until the record is loaded.
            let fresh = Model::lazy(0.0, &Default::default());
            let resumed = run(&fresh, Some(tail), EPOCHS, Some((stop, &whole)));
            assert_eq!(bits(&resumed.model), bits(&whole.model), "{tail:?} {stop}");
            for epoch in stop + 1..=EPOCHS {
                let (resumed, whole) = (&resumed.directory, &whole.directory);
                assert_eq!(resumed.records(epoch), whole.records(epoch));
            }
            let shown = |outcome: &Outcome<B>| {
                let shown = outcome.watch.shown("train: ");
                shown[shown.len() - 7..].to_vec()
            };
            assert_eq!(shown(&resumed), shown(&whole));
        }
        // And so does one that had ended.
        let ended = run(&start, Some(tail), EPOCHS - 1, None);
        let resumed = run(&start, Some(tail), EPOCHS, Some((EPOCHS - 1, &ended)));
        assert_eq!(bits(&resumed.model), bits(&whole.model));
    }
}

/// Burn's own strategy leaves a window open when an epoch ends; it is closed here.
#[test]
fn it_continues_from_burns_own_training() {
    let _turn = crate::turn();
    let start = Model::new();
    let burns = run(&start, None, 1, None);
    assert_eq!(recorded(&burns.directory, 1, "window micro-steps"), 3);

    // 3 of 4 and 7 more: two updates and another of two.
    let resumed = run(&start, Some(EpochTail::Apply), 2, Some((1, &burns)));
    let counter = |name| recorded(&resumed.directory, 2, name);
    assert_eq!(counter("updates"), 1 + 3);
    assert_eq!(counter("micro-batches"), 14);

    // Windows that are carried over are Burn's, but for the model that is returned.
    let carried = run(&start, Some(EpochTail::Carry), 2, None);
    let burns = run(&start, None, 2, None);
    assert_eq!(carried.directory.records(2), burns.directory.records(2));
}

/// There is no learning rate to apply a window at before the first step.
#[test]
fn an_epoch_of_nothing_leaves_the_window_as_it_is() {
    let _turn = crate::turn();
    let start = Model::new();
    let burns = run(&start, None, 1, None);
    for tail in [EpochTail::Apply, EpochTail::Carry] {
        let nothing = run_on(Vec::new(), &start, Some(tail), 2, Some((1, &burns)));
        assert_eq!(nothing.directory.records(2), burns.directory.records(1));
        assert_eq!(bits(&nothing.model), bits(&burns.model));
    }
}
