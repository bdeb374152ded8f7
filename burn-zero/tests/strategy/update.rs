//! An update that reduces its gradients over ranks trains in the Learner by its own strategy.

use burn::optim::AdamWConfig;
use burn_accum::AccumConfig;
use burn_update::{Update, UpdateStrategy};
use burn_zero::{ReduceOverRanks, Stage, ZeroSettings};

use crate::learner::{MICRO_BATCH, Outcome, Setup, train};
use crate::model::{Model, Row, bits, rows};
use crate::{Z, falling, on_ranks, repeated};

fn reduced(stage: Stage) -> Update<Model<Z>, Z> {
    let settings = ZeroSettings {
        bucket_elements: 20,
        ..ZeroSettings::stage(stage)
    };
    let update = Update::new(AdamWConfig::new().init());
    update.reduce_in_learner(settings).unwrap()
}

fn trained(ranks: usize, stage: Stage, start: &Model<Z>, setup: Setup) -> Outcome<Z> {
    let update = reduced(stage);
    let strategy = update.strategy().threads(ranks);
    train(
        start.clone(),
        update,
        falling(),
        setup,
        Some(strategy.into()),
    )
}

#[test]
fn it_is_the_wrapper_bit_for_bit_in_every_stage() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 20);
    for stage in crate::STAGES {
        let wrapped = on_ranks(2, stage, &start, Setup::new(data.clone(), 2));
        let update = trained(2, stage, &start, Setup::new(data.clone(), 2));
        assert_eq!(bits(&update.model), bits(&wrapped.model), "{stage}");
        assert_eq!(update.watch.lines(), wrapped.watch.lines(), "{stage}");
    }
}

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
        let three = trained(3, stage, &Model::new(), Setup::new(rows(0, 30), 2));
        let plain = {
            let update = Update::<Model<Z>, Z>::new(AdamWConfig::new().init());
            let strategy = Some(update.strategy().into());
            let setup = resumed(data.clone(), &three);
            train(Model::new(), update, falling(), setup, strategy)
        };
        for ranks in [1, 2] {
            let setup = resumed(repeated(&data, ranks), &three);
            let ours = trained(ranks, stage, &Model::new(), setup);
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
        let update = reduced(Stage::Gradients).accumulate(windows).unwrap();
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
