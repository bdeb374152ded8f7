//! A Learner validates with the average of the weights, and its records have it.

use burn::optim::AdamWConfig;
use burn_update::{AverageConfig, Update};
use burn_zero::Stage;

use crate::learner::{Outcome, Setup, train};
use crate::model::{Model, bits, rows};
use crate::{STAGES, Z, falling, repeated};

fn on(ranks: Option<(usize, Stage)>, setup: Setup) -> Outcome<Z> {
    let average = AverageConfig::new(0.8);
    let update = match ranks {
        None => Update::new(AdamWConfig::new().init()).average(average),
        Some((_, stage)) => crate::adamw(stage).average(average),
    };
    let update = update.unwrap();
    let threads = ranks.map_or(1, |(ranks, _)| ranks);
    let strategy = update.strategy().threads(threads);
    let strategy = Some(strategy.into());
    train(Model::new(), update, falling(), setup, strategy)
}

/// What is logged of validations.
fn validated(outcome: &Outcome<Z>) -> Vec<String> {
    outcome.watch.logged("valid ")
}

/// The averages are part of a record as of an update without ranks, whoever has written it.
#[test]
fn ranks_validate_and_record_the_average_as_one() {
    let _turn = crate::turn();
    let data = rows(0, 12);
    let one = on(None, Setup::new(data.clone(), 2));
    for stage in STAGES {
        for ranks in [1, 2] {
            let both = on(Some((ranks, stage)), Setup::new(repeated(&data, ranks), 2));
            assert_eq!(bits(&both.model), bits(&one.model), "{ranks} {stage}");
            let average = |outcome: &Outcome<Z>| {
                let (_, _, record) = outcome.directory.records(2);
                record.pointer("/item/parts/average").unwrap().clone()
            };
            assert_eq!(average(&both), average(&one), "{ranks} {stage}");
            assert_eq!(validated(&both), validated(&one), "{ranks} {stage}");
        }
    }
}

#[test]
fn a_record_of_three_ranks_is_continued_by_any_number() {
    let _turn = crate::turn();
    let data = rows(40, 58);
    for stage in [Stage::Gradients, Stage::Parameters] {
        let three = on(Some((3, stage)), Setup::new(rows(0, 30), 2));
        let resumed = |data| {
            let mut setup = Setup::new(data, 3);
            setup.resume = Some((2, three.directory.path().to_owned()));
            setup
        };
        let plain = on(None, resumed(data.clone()));
        for ranks in [1, 2] {
            let ours = on(Some((ranks, stage)), resumed(repeated(&data, ranks)));
            assert_eq!(bits(&ours.model), bits(&plain.model), "{ranks} {stage}");
            assert_eq!(validated(&ours), validated(&plain), "{ranks} {stage}");
        }
    }
}
