//! Ranks that each run the whole program are the same as ranks that the strategy starts. Here they
//! are threads nevertheless; `tests/mpi` has processes.

use std::sync::Arc;

use burn::optim::SgdConfig;
use burn_ranks::Operation;
use burn_ranks::shard::Parameter;
use burn_update::Update;
use burn_zero::{
    GroupOptions, ProcessGroup, ReduceOverRanks, ShardMap, Stage, ThreadGroup, ZeroSettings,
};

use crate::learner::{Outcome, Setup, train};
use crate::model::{Model, bits, rows};
use crate::{Z, adamw, falling, on_ranks};

/// What each rank saw.
fn programs(ranks: usize, setup: impl Fn() -> Setup + Sync) -> Vec<Outcome<Z>> {
    ThreadGroup::spawn(ranks, GroupOptions::default(), |group| {
        let update = adamw::<Z>(Stage::Gradients);
        let strategy = update.strategy().process(Arc::new(group));
        let model = Model::<Z>::new();
        train(model, update, falling(), setup(), Some(strategy.into()))
    })
    .unwrap()
}

#[test]
fn they_are_threads_of_one_program() {
    let _turn = crate::turn();
    let setup = || {
        let mut setup = Setup::new(rows(0, 31), 2);
        setup.valid = rows(1000, 1017);
        setup.shuffle = Some(5);
        setup
    };
    let threads = on_ranks(3, Stage::Gradients, &Model::new(), setup());
    let programs = programs(3, setup);
    for program in &programs {
        assert_eq!(bits(&program.model), bits(&threads.model));
    }
    let lines = programs[0].watch.lines();
    assert_eq!(lines, threads.watch.lines());
}

#[test]
fn only_rank_0_renders_and_writes() {
    let _turn = crate::turn();
    let programs = programs(2, || Setup::new(rows(0, 16), 2));
    let [first, second] = &programs[..] else {
        unreachable!("there are two");
    };
    assert!(first.directory.is_recorded(2));
    assert!(!second.directory.is_recorded(1) && !second.directory.is_recorded(2));
    let nothing: [Vec<String>; 2] = [Vec::new(), Vec::new()];
    assert_eq!(second.watch.lines(), nothing);
}

/// Each rank has its own interrupter.
#[test]
fn one_interrupted_program_interrupts_all() {
    let _turn = crate::turn();
    // In the second rank's part.
    let programs = programs(2, || {
        let mut setup = Setup::new(rows(0, 40), 3);
        setup.interrupt_at = Some(25);
        setup
    });
    for program in programs {
        let reason = program.interrupter.get_message();
        assert_eq!(reason.as_deref(), Some("there it is"));
        assert!(!program.directory.is_recorded(1));
    }
}

#[test]
fn each_program_reads_the_records() {
    let _turn = crate::turn();
    let whole = on_ranks(
        2,
        Stage::Gradients,
        &Model::new(),
        Setup::new(rows(0, 16), 3),
    );
    let resumed = programs(2, || {
        let mut setup = Setup::new(rows(0, 16), 3);
        setup.resume = Some((2, whole.directory.path().to_owned()));
        setup
    });
    for program in &resumed {
        assert_eq!(bits(&program.model), bits(&whole.model));
    }
    let (ours, expected) = (&resumed[0].directory, &whole.directory);
    assert_eq!(ours.records(3), expected.records(3));
}

/// Two records of two moments: each rank sends its part of them once, to rank 0, which sends
/// nothing. Beside them come items of 5 bytes: in each epoch one of training from each rank, and of
/// the two batches of validation the second from rank 1.
#[test]
fn a_record_costs_each_rank_its_state_once() {
    let _turn = crate::turn();
    const RANKS: usize = 3;
    let traffic = ThreadGroup::spawn(RANKS, GroupOptions::default(), |group| {
        let update = adamw::<Z>(Stage::OptimizerState);
        let strategy = update.strategy().process(Arc::new(group.clone()));
        let model = Model::<Z>::new();
        let setup = Setup::new(rows(0, 12), 2);
        train(model, update, falling(), setup, Some(strategy.into()));
        group.traffic()
    });
    let parameters = vec![
        Parameter::new("first.weight", 35),
        Parameter::new("second.weight", 21),
    ];
    let map = ShardMap::flat(parameters, RANKS, 20).unwrap();
    for (rank, traffic) in traffic.unwrap().iter().enumerate() {
        let owned = map.shard(rank).into_iter().flatten();
        let elements: usize = owned.map(|range| range.len()).sum();
        assert!(elements > 0);
        let state = if rank == 0 { 0 } else { 2 * 2 * 4 * elements };
        let expected = state + 5 * [0, 4, 2][rank];
        let sent = traffic.of(Operation::GatherBytesTo);
        assert_eq!(sent.data_bytes, expected as u64, "rank {rank}");
    }
}

/// In training no process sends an output, and the model is the same; validation is of all ranks.
#[test]
fn metrics_of_training_can_be_those_of_rank_0() {
    let _turn = crate::turn();
    let run = |of_rank_0: bool| {
        let trained = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
            // Without optimizer state, so that a record sends nothing.
            let update: Update<Model<Z>, Z> = Update::new(SgdConfig::new().init())
                .reduce_in_learner(ZeroSettings::stage(Stage::Gradients))
                .unwrap();
            let mut strategy = update.strategy().process(Arc::new(group.clone()));
            if of_rank_0 {
                strategy = strategy.with_train_metrics_of_rank_0();
            }
            let model = Model::<Z>::new();
            let setup = Setup::new(rows(0, 16), 1);
            let trained = train(model, update, falling(), setup, Some(strategy.into()));
            (
                trained,
                group.traffic().of(Operation::GatherBytesTo).data_bytes,
            )
        });
        trained.unwrap()
    };
    let (whole, of_rank_0) = (run(false), run(true));
    // Two steps of training of a rank, and of the two batches of validation one is rank 1's.
    assert_eq!([whole[1].1, of_rank_0[1].1], [(2 + 1) * 5, 5]);
    let (whole, of_rank_0) = (&whole[0].0, &of_rank_0[0].0);
    assert_eq!(bits(&of_rank_0.model), bits(&whole.model));
    assert_eq!(
        of_rank_0.watch.logged("valid "),
        whole.watch.logged("valid ")
    );
    assert_eq!(of_rank_0.watch.shown("train: ").len(), 2);
    assert_eq!(whole.watch.shown("train: ").len(), 4);
}
