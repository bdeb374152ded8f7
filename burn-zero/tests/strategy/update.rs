//! What the loop does by updates, and what a record is continued by.

use burn_accum::AccumConfig;
use burn_update::UpdateStrategy;
use burn_zero::Stage;

use crate::learner::{MICRO_BATCH, Outcome, Setup, train};
use crate::model::{Model, Row, bits, rows};
use crate::{Z, adamw, falling, on_ranks, repeated, without_ranks};

fn resumed(data: Vec<Row>, from: &Outcome<Z>) -> Setup {
    let mut setup = Setup::new(data, 3);
    setup.resume = Some((2, from.directory.path().to_owned()));
    setup
}

/// Three ranks leave a record. An update without ranks goes on with it, and so do two ranks and one.
#[test]
fn a_record_of_three_ranks_is_continued_by_any_number() {
    let _turn = crate::turn();
    let data = rows(40, 58);
    for stage in [Stage::Gradients, Stage::Parameters] {
        let three = on_ranks(3, stage, &Model::new(), Setup::new(rows(0, 30), 2));
        let plain = without_ranks::<Z>(&Model::new(), resumed(data.clone(), &three));
        for ranks in [1, 2] {
            let setup = resumed(repeated(&data, ranks), &three);
            let ours = on_ranks(ranks, stage, &Model::new(), setup);
            assert_eq!(bits(&ours.model), bits(&plain.model), "{ranks} {stage}");
        }
    }
}

/// Windows of two micro-batches, recorded after each update: each rank counts its own copy's.
#[test]
fn it_counts_in_updates_and_goes_on_within_an_epoch() {
    let _turn = crate::turn();
    let by_updates = |resume: Option<(usize, std::path::PathBuf)>| {
        let windows = AccumConfig::mean(2);
        let update = adamw::<Z>(Stage::Gradients).accumulate(windows).unwrap();
        let progress = update.progress();
        let strategy: UpdateStrategy<_> = update.strategy();
        let strategy = strategy.threads(2).until_updates(4);
        let strategy = strategy.validate_every(1).unwrap();
        // Five batches for each rank, so that the first epoch ends within the third window.
        let mut setup = Setup::new(rows(0, 2 * 5 * MICRO_BATCH), 1);
        setup.resume = resume;
        let schedule = update.per_update(falling());
        let strategy = Some(strategy.into());
        let outcome = train(Model::<Z>::new(), update, schedule, setup, strategy);
        assert_eq!(progress.updates(), 4);
        outcome
    };
    let whole = by_updates(None);
    assert!(whole.directory.is_recorded(4) && !whole.directory.is_recorded(5));
    let rest = by_updates(Some((1, whole.directory.path().to_owned())));
    assert_eq!(bits(&rest.model), bits(&whole.model));
    let batches = |outcome: &Outcome<Z>| outcome.watch.shown("train: ").len();
    assert_eq!(batches(&rest), batches(&whole) - 4);
}
