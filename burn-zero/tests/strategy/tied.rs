//! A weight that the model holds at two paths is one parameter in the Learner too, which takes the
//! two apart when it begins and when it loads.

use std::sync::Arc;

use burn_zero::{SingleRank, Stage};

use crate::learner::{self, Setup, train};
use crate::model::{Model, bits, rows};
use crate::{Z, adamw, falling, on_ranks, repeated, without_ranks};

/// The weights without the second path, which has the first's.
fn weights<B: burn::tensor::backend::Backend>(model: &Model<B>) -> Vec<Vec<u32>> {
    let mut weights = bits(model);
    assert_eq!(weights.len(), 3);
    assert_eq!(weights.pop().as_ref(), weights.first());
    weights
}

#[test]
fn it_is_a_weight_that_is_used_twice() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 22);
    let burns = without_ranks(&start.clone().reusing(), Setup::new(data.clone(), 3));
    for ranks in [1, 2] {
        for stage in crate::STAGES {
            let setup = || Setup::new(repeated(&data, ranks), 3);
            let ours = on_ranks(ranks, stage, &start.clone().tied(), setup());
            assert_eq!(weights(&ours.model), bits(&burns.model), "{ranks} {stage}");
            assert_eq!(ours.watch.logged("valid "), burns.watch.logged("valid "));

            let mut again = setup();
            again.resume = Some((2, ours.directory.path().to_owned()));
            let resumed = on_ranks(ranks, stage, &Model::<Z>::new().tied(), again);
            assert_eq!(
                weights(&resumed.model),
                bits(&burns.model),
                "{ranks} {stage}"
            );
            assert_eq!(resumed.directory.records(3), ours.directory.records(3));
        }
    }
}

/// The optimizer's state is that of Burn's, and not there twice.
#[test]
fn records_are_burns() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let burns = without_ranks(&start.clone().reusing(), Setup::new(rows(0, 10), 2));
    let setup = Setup::new(repeated(&rows(0, 10), 2), 2);
    let ours = on_ranks(2, Stage::Gradients, &start.tied(), setup);
    let [(_, _, ours), (_, _, burns)] = [&ours, &burns].map(|outcome| outcome.directory.records(2));
    assert_eq!(ours, burns);
}

/// One rank needs no `Sharded`.
#[test]
fn one_rank_trains_it_on_burns_backend() {
    let _turn = crate::turn();
    let start = Model::<learner::B>::new();
    let setup = || Setup::new(rows(0, 22), 2);
    let burns = without_ranks(&start.clone().reusing(), setup());
    let update = adamw::<learner::B>(Stage::OptimizerState);
    let strategy = update.strategy().process(Arc::new(SingleRank::new()));
    let strategy = Some(strategy.into());
    let ours = train(start.tied(), update, falling(), setup(), strategy);
    assert_eq!(weights(&ours.model), bits(&burns.model));
}
