//! Processes that load their own parts of the data, as with PyTorch's `DistributedSampler`. Here they are threads; what each loads is
//! its own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};

use burn::lr_scheduler::LrScheduler;
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_zero::{GroupOptions, Loaders, Stage, ThreadGroup, Uneven, ZeroStrategy};

use crate::learner::{MICRO_BATCH, Outcome, Setup, train};
use crate::model::{Model, Row, assert_close, bits, rows};
use crate::{Z, adamw, falling, on_ranks};

struct Programs {
    loaders: Loaders,
    uneven: Uneven,
    sharing: bool,
    epochs: usize,
}

const SPLIT: Programs = Programs {
    loaders: Loaders::TrainSplit,
    uneven: Uneven::Repeat,
    sharing: true,
    epochs: 2,
};

impl Programs {
    /// What each rank has seen that trains on its part, and validates on its part or all.
    fn run(
        &self,
        train_on: &[Vec<Row>],
        valid: impl Fn(usize) -> Vec<Row> + Sync,
    ) -> Vec<Outcome<Z>> {
        let making = Mutex::new(());
        ThreadGroup::spawn(train_on.len(), GroupOptions::default(), |group| {
            let rank = burn_zero::ProcessGroup::rank(&group);
            let mut strategy = ZeroStrategy::process(Arc::new(group))
                .with_loaders(self.loaders)
                .with_uneven(self.uneven);
            if self.sharing {
                strategy = strategy.sharing_items();
            }
            let model = {
                let _turn = making.lock().unwrap();
                Model::<Z>::new()
            };
            let mut setup = Setup::new(train_on[rank].clone(), self.epochs);
            setup.valid = valid(rank);
            let optimizer = adamw::<Z>(Stage::Gradients);
            train(model, optimizer, falling(), setup, Some(strategy.into()))
        })
        .unwrap_or_else(|error| panic!("{error}"))
    }

    fn refusal(&self, train_on: &[Vec<Row>], valid: impl Fn(usize) -> Vec<Row> + Sync) -> String {
        let run = AssertUnwindSafe(|| drop(self.run(train_on, valid)));
        *catch_unwind(run).unwrap_err().downcast::<String>().unwrap()
    }
}

fn all(_: usize) -> Vec<Row> {
    rows(1000, 1017)
}

/// Parts that are equally long are those that the strategy would have cut.
#[test]
fn equal_parts_are_those_of_a_whole() {
    let _turn = crate::turn();
    let mut setup = Setup::new(rows(0, 30), 2);
    setup.valid = all(0);
    let whole = on_ranks(3, Stage::Gradients, &Model::new(), setup);
    let parts = [rows(0, 10), rows(10, 20), rows(20, 30)];
    for uneven in [Uneven::Repeat, Uneven::Drop, Uneven::Refuse] {
        let programs = Programs { uneven, ..SPLIT }.run(&parts, all);
        for program in &programs {
            assert_eq!(bits(&program.model), bits(&whole.model));
        }
        assert_eq!(programs[0].watch.lines(), whole.watch.lines());
    }
}

/// Two batches, four, and one and a half.
#[test]
fn short_parts_begin_anew_until_the_longest_ends() {
    let _turn = crate::turn();
    let parts = [
        rows(0, 2 * MICRO_BATCH),
        rows(100, 100 + 4 * MICRO_BATCH),
        rows(200, 200 + MICRO_BATCH + 2),
    ];
    let programs = SPLIT.run(&parts, all);

    let start = Model::<Z>::new();
    let (mut model, mut optimizer) = (start, AdamWConfig::new().init::<Z, Model<Z>>());
    let mut scheduler = falling();
    for step in (0..4).chain(0..4) {
        let means = parts.iter().map(|part| {
            let batches: Vec<_> = part.chunks(MICRO_BATCH).collect();
            let batch = batches[step % batches.len()];
            model.loss_sum(batch) / (batch.len() * parts.len()) as f32
        });
        let loss = means.reduce(|all, mean| all + mean).unwrap();
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(scheduler.step(), model, gradients);
    }
    for program in &programs {
        assert_close(&program.model, &model, 2e-4);
        assert_eq!(bits(&program.model), bits(&programs[0].model));
    }

    let shown = programs[0].watch.shown("train: ");
    assert_eq!(shown.len(), 2 * 4 * parts.len());
    // Progress is that over all items.
    let total: usize = parts.iter().map(Vec::len).sum();
    let end = format!("{total}/{total}");
    assert!(shown.last().unwrap().contains(&end), "{shown:?}");
}

#[test]
fn what_the_shortest_has_no_batch_for_is_dropped() {
    let _turn = crate::turn();
    let parts = [rows(0, 4 * MICRO_BATCH), rows(100, 100 + 2 * MICRO_BATCH)];
    let uneven = Uneven::Drop;
    let dropped = Programs { uneven, ..SPLIT }.run(&parts, all);
    let shorter = [rows(0, 2 * MICRO_BATCH), parts[1].clone()];
    let expected = SPLIT.run(&shorter, all);
    assert_eq!(dropped[0].watch.shown("train: ").len(), 2 * 2 * 2);
    assert_eq!(bits(&dropped[0].model), bits(&expected[0].model));
    assert_eq!(bits(&dropped[1].model), bits(&expected[0].model));
}

#[test]
fn parts_that_will_not_do_are_refused_before_the_first_step() {
    let _turn = crate::turn();
    let uneven = Uneven::Refuse;
    let parts = [rows(0, 9), rows(9, 16)];
    let told = Programs { uneven, ..SPLIT }.refusal(&parts, all);
    assert!(told.contains("[9, 7] items to train on"), "{told}");

    let told = SPLIT.refusal(&[rows(0, 9), Vec::new()], all);
    assert!(told.contains("rank 1 has no items"), "{told}");

    let unshared = Programs {
        loaders: Loaders::Split,
        sharing: false,
        ..SPLIT
    };
    let told = unshared.refusal(&[rows(0, 8), rows(8, 16)], all);
    assert!(told.contains("sharing_items"), "{told}");

    let told = SPLIT.refusal(&[rows(0, 8), rows(8, 16)], |rank| rows(0, 5 + rank));
    assert!(
        told.contains("5 items to validate on") && told.contains("6 items"),
        "{told}"
    );
}

#[test]
fn threads_share_one_loader() {
    let _turn = crate::turn();
    let strategy = ZeroStrategy::threads(2).with_loaders(Loaders::TrainSplit);
    let run = AssertUnwindSafe(|| {
        let optimizer = adamw::<Z>(Stage::Gradients);
        let setup = Setup::new(rows(0, 8), 1);
        drop(train(
            Model::<Z>::new(),
            optimizer,
            falling(),
            setup,
            Some(strategy.into()),
        ));
    });
    let told = *catch_unwind(run).unwrap_err().downcast::<String>().unwrap();
    assert!(told.contains("Loaders::TrainSplit"), "{told}");
}

/// Every batch of every part is validated once, in turn.
#[test]
fn validation_data_may_be_in_parts() {
    let _turn = crate::turn();
    let train_on = [rows(0, 8), rows(8, 16)];
    let programs = Programs {
        loaders: Loaders::Split,
        epochs: 1,
        ..SPLIT
    };
    // Three batches and one: rank 0's, rank 1's, and the rest of rank 0's.
    let [long, short] = [rows(1000, 1010), rows(2000, 2003)];
    let parts = programs.run(&train_on, |rank| match rank {
        0 => long.clone(),
        _ => short.clone(),
    });
    let in_turn = [&long[..4], &short[..], &long[4..]].concat();
    let lines = |outcome: &Outcome<Z>| outcome.watch.logged("valid ");
    assert_eq!(parts[0].watch.shown("valid: ").len(), 4);
    assert!(parts[1].watch.shown("valid: ").is_empty());

    // One rank that sees the same batches one after the other, of the same model.
    let mean = |data: &[Row]| {
        let model = parts[0].model.clone();
        let losses = data.iter().map(|row| {
            let loss = model
                .loss_sum(&[*row])
                .into_data()
                .iter::<f32>()
                .sum::<f32>();
            f64::from(loss)
        });
        losses.sum::<f64>()
    };
    let batches = [
        &in_turn[..4],
        &in_turn[4..7],
        &in_turn[7..11],
        &in_turn[11..],
    ];
    let lines = lines(&parts[0]);
    for batch in batches {
        let expected = mean(batch) / batch.len() as f64;
        let found = lines.iter().any(|line| {
            let numbers = line.split(|c: char| !(c.is_ascii_digit() || c == '.'));
            let mut numbers = numbers.filter_map(|number| number.parse::<f64>().ok());
            numbers.any(|number| (number - expected).abs() < 1e-5 * expected)
        });
        assert!(found, "{expected} is not in {lines:#?}");
    }
}
