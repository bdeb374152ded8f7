//! Training is resumed at the same and at other numbers of ranks.

use burn::module::Module;
use burn_zero::Stage;

use crate::learner::{Outcome, Setup};
use crate::model::{Model, Row, bits, rows};
use crate::{Z, as_burn, on_ranks, repeated};

fn resumed(data: Vec<Row>, from: &Outcome<Z>) -> Setup {
    let mut setup = Setup::new(data, 3);
    setup.resume = Some((2, from.directory.path().to_owned()));
    setup
}

#[test]
fn at_the_same_number_it_is_as_if_it_had_not_ended() {
    let _turn = crate::turn();
    let data = rows(0, 30);
    for stage in crate::STAGES {
        let whole = on_ranks(3, stage, &Model::new(), Setup::new(data.clone(), 3));
        // The model is another one until the record is loaded.
        let fresh = Model::lazy(0.0, &Default::default());
        let resumed = on_ranks(3, stage, &fresh, resumed(data.clone(), &whole));
        assert_eq!(bits(&resumed.model), bits(&whole.model), "{stage}");
        assert_eq!(resumed.directory.records(3), whole.directory.records(3));
    }
}

/// Three ranks leave a record. Burn alone goes on with it, and so do two ranks and one.
#[test]
fn at_another_number_it_begins_with_the_same_state() {
    let _turn = crate::turn();
    let three = on_ranks(
        3,
        Stage::Gradients,
        &Model::new(),
        Setup::new(rows(0, 30), 2),
    );
    let data = rows(40, 58);
    let burns = as_burn(&Model::new(), resumed(data.clone(), &three));
    for ranks in [1, 2] {
        for stage in crate::STAGES {
            let setup = resumed(repeated(&data, ranks), &three);
            let ours = on_ranks(ranks, stage, &Model::new(), setup);
            assert_eq!(bits(&ours.model), bits(&burns.model), "{ranks} {stage}");
            assert_eq!(ours.directory.records(3), burns.directory.records(3));
        }
    }
}

/// Burn ignores the state of a layer that is frozen now.
#[test]
fn with_a_layer_that_is_frozen_it_goes_on_as_burn_does() {
    let _turn = crate::turn();
    let data = rows(0, 30);
    let whole = on_ranks(2, Stage::Gradients, &Model::new(), Setup::new(data, 2));
    let mut start = Model::new();
    start.first = start.first.no_grad();
    let data = rows(40, 58);
    let burns = as_burn(&start, resumed(data.clone(), &whole));
    for ranks in [1, 2] {
        for stage in crate::STAGES {
            let setup = resumed(repeated(&data, ranks), &whole);
            let ours = on_ranks(ranks, stage, &start, setup);
            assert_eq!(bits(&ours.model), bits(&burns.model), "{ranks} {stage}");
        }
    }
}
