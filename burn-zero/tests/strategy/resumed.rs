//! Training is resumed at the same and at other numbers of ranks.

use burn::module::Module;
use burn::optim::{GradientsParams, MultiGradientsParams, Optimizer};
use burn_zero::Stage;

use crate::learner::{Outcome, Setup, train};
use crate::model::{Model, Row, bits, rows};
use crate::{Z, on_ranks, repeated, without_ranks};

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

/// Three ranks leave a record. An update without ranks goes on with it, and so do two ranks and one.
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
    let burns = without_ranks::<Z>(&Model::new(), resumed(data.clone(), &three));
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
    let burns = without_ranks(&start, resumed(data.clone(), &whole));
    for ranks in [1, 2] {
        for stage in crate::STAGES {
            let setup = resumed(repeated(&data, ranks), &whole);
            let ours = on_ranks(ranks, stage, &start, setup);
            assert_eq!(bits(&ours.model), bits(&burns.model), "{ranks} {stage}");
        }
    }
}

/// Makes a record twice and writes the second.
#[derive(Clone)]
struct Twice<O>(O);

impl<O: Optimizer<Model<Z>, Z>> Optimizer<Model<Z>, Z> for Twice<O> {
    type Record = O::Record;

    fn step(&mut self, lr: f64, model: Model<Z>, gradients: GradientsParams) -> Model<Z> {
        self.0.step(lr, model, gradients)
    }

    fn step_multi(&mut self, _: f64, _: Model<Z>, _: MultiGradientsParams) -> Model<Z> {
        unreachable!("a rank has one device")
    }

    fn to_record(&self) -> Self::Record {
        drop(self.0.to_record());
        self.0.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        Self(self.0.load_record(record))
    }
}

#[test]
fn each_record_of_one_save_has_the_state_of_all_ranks() {
    let _turn = crate::turn();
    let start = Model::new();
    for stage in crate::STAGES {
        let once = on_ranks(2, stage, &start, Setup::new(rows(0, 20), 1));
        let update = crate::adamw::<Z>(stage);
        let strategy = Some(update.strategy().threads(2).into());
        let setup = Setup::new(rows(0, 20), 1);
        let twice = Twice(update);
        let twice = train(start.clone(), twice, crate::falling(), setup, strategy);
        let [once, twice] = [once, twice].map(|it| it.directory.records(1));
        assert!(twice == once, "{stage}");
    }
}
