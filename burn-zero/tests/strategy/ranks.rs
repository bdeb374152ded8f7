//! Several ranks are one on the data of all.

use burn::lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig};
use burn::module::{Module, ModuleMapper, Param};
use burn::optim::{AdamWConfig, GradientsParams, MultiGradientsParams, Optimizer};
use burn::tensor::Tensor;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_update::{Update, UpdateRecord};
use burn_zero::{ReduceOverRanks, Stage, ZeroSettings};

use crate::learner::{MICRO_BATCH, Outcome, Setup, Stop, train};
use crate::model::{Model, Row, assert_close, bits, counted, rows};
use crate::{Z, falling, on_ranks, repeated, without_ranks};

/// Burn's optimizer on the union of what the ranks train on in each step.
fn on_the_union(start: &Model<Z>, data: &[Row], ranks: usize, epochs: usize) -> Model<Z> {
    let parts: Vec<_> = data.chunks(data.len() / ranks).collect();
    let (mut model, mut optimizer) = (start.clone(), AdamWConfig::new().init::<Z, Model<Z>>());
    let mut scheduler = LinearLrSchedulerConfig::new(0.1, 0.01, 40).init().unwrap();
    for _ in 0..epochs {
        for step in 0..parts[0].len().div_ceil(MICRO_BATCH) {
            let batches = parts
                .iter()
                .filter_map(|part| part.chunks(MICRO_BATCH).nth(step));
            let union: Vec<_> = batches.flatten().copied().collect();
            let loss = model.loss_sum(&union) / counted(&union) as f32;
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(scheduler.step(), model, gradients);
        }
    }
    model
}

#[test]
fn they_are_one_rank_on_the_union_of_their_batches() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    for ranks in [2, 3] {
        let data = rows(0, ranks * 10);
        let expected = on_the_union(&start, &data, ranks, 2);
        let outcomes: Vec<_> = crate::STAGES
            .map(|stage| on_ranks(ranks, stage, &start, Setup::new(data.clone(), 2)))
            .into();
        for outcome in &outcomes {
            assert_close(&outcome.model, &expected, 2e-4);
            // Stage by stage bit for bit, in everything that is seen.
            assert_eq!(bits(&outcome.model), bits(&outcomes[0].model));
            assert_eq!(outcome.watch.lines(), outcomes[0].watch.lines());
            for epoch in 1..=2 {
                assert_eq!(
                    outcome.directory.records(epoch),
                    outcomes[0].directory.records(epoch)
                );
            }
        }
        // Rank 0 shows the items of all ranks: 10 rows are 3 batches.
        let shown = &outcomes[0].watch;
        assert_eq!(shown.shown("train: ").len(), 2 * 3 * ranks);
        assert_eq!(shown.shown("valid: ").len(), 2 * 2);
        assert_eq!(shown.shown("ended").len(), 1);
    }
}

/// Two ranks with the same data: the mean is that of one, bit for bit, and so is all that is
/// recorded.
#[test]
fn the_same_data_on_two_ranks_is_burns_training() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 22);
    let burns = without_ranks(&start, Setup::new(data.clone(), 3));
    for stage in crate::STAGES {
        let setup = Setup::new(repeated(&data, 2), 3);
        let ours = on_ranks(2, stage, &start, setup);
        assert_eq!(bits(&ours.model), bits(&burns.model));
        for epoch in 1..=3 {
            assert_eq!(
                ours.directory.records(epoch),
                burns.directory.records(epoch)
            );
        }
        // Validation is shared, and its metrics are those of one rank to the last bit.
        assert_eq!(ours.watch.logged("valid "), burns.watch.logged("valid "));
        assert_eq!(ours.watch.shown("valid: "), burns.watch.shown("valid: "));
    }
}

/// A frozen parameter, which stage 3 shards, is in Burn's records and in the returned model.
#[test]
fn frozen_parameters_are_those_of_stage_2() {
    let _turn = crate::turn();
    let mut start = Model::<Z>::new();
    start.first = start.first.no_grad();
    let data = rows(0, 20);
    let [expected, found] = [Stage::Gradients, Stage::Parameters]
        .map(|stage| on_ranks(2, stage, &start, Setup::new(data.clone(), 2)));
    assert_eq!(bits(&found.model), bits(&expected.model));
    assert_eq!(found.watch.lines(), expected.watch.lines());
    for epoch in 1..=2 {
        let records = found.directory.records(epoch);
        assert_eq!(records, expected.directory.records(epoch));
    }
}

/// However many batches there are for however many ranks.
#[test]
fn validation_is_that_of_one_rank() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 8);
    for items in [0, 1, 4, 17, 24] {
        let setup = |data| {
            let mut setup = Setup::new(data, 1);
            setup.valid = rows(1000, 1000 + items);
            setup
        };
        let burns = without_ranks(&start, setup(data.clone()));
        for stage in [Stage::Gradients, Stage::Parameters] {
            let ours = on_ranks(2, stage, &start, setup(repeated(&data, 2)));
            assert_eq!(ours.watch.logged("valid "), burns.watch.logged("valid "));
            assert_eq!(
                ours.watch.shown("item valid: "),
                burns.watch.shown("item valid: ")
            );
        }
    }
}

#[test]
fn one_interrupted_rank_interrupts_all_after_the_same_step() {
    let _turn = crate::turn();
    // In the second batch of the second rank's part, of five.
    for stage in [Stage::Gradients, Stage::Parameters] {
        let mut setup = Setup::new(rows(0, 40), 3);
        setup.interrupt_at = Some(25);
        let ours = on_ranks(2, stage, &Model::new(), setup);
        assert_eq!(
            ours.interrupter.get_message().as_deref(),
            Some("there it is")
        );
        assert!(!ours.directory.is_recorded(1));
        let steps = ours.watch.shown("train: ").len();
        assert!(
            steps.is_multiple_of(2) && (2..=4).contains(&steps),
            "{steps}"
        );
    }
}

#[test]
fn rank_0_decides_when_to_stop_early() {
    let _turn = crate::turn();
    for stage in [Stage::OptimizerState, Stage::Parameters] {
        let mut setup = Setup::new(rows(0, 16), 40);
        setup.stop = Some(Stop::After(2));
        let ours = on_ranks(3, stage, &Model::new(), setup);
        assert!(ours.directory.is_recorded(2) && !ours.directory.is_recorded(3));
    }
}

/// 23 rows for 3 ranks.
#[test]
fn uneven_data_is_evened_out() {
    let _turn = crate::turn();
    let total = || -> usize {
        let setup = Setup::new(rows(0, 23), 1);
        let outcome = on_ranks(3, Stage::Gradients, &Model::new(), setup);
        let shown = outcome.watch.shown("train: ");
        let (_, items) = shown.last().unwrap().rsplit_once('/').unwrap();
        items.parse().unwrap()
    };
    assert_eq!(total(), 24);
}

/// Windows of four, of 6 batches an epoch: each rank has its own counter.
#[test]
fn open_windows_are_applied_at_the_end_of_an_epoch() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 22);
    let update = Update::new(AdamWConfig::new().init()).accumulate(AccumConfig::mean(4));
    let update = update.unwrap();
    let (progress, scheduler) = (update.progress(), update.per_update(falling()));
    let strategy = Some(update.strategy().into());
    let setup = Setup::new(data.clone(), 2);
    let alone: Outcome<Z> = train(start.clone(), update, scheduler, setup, strategy);
    assert_eq!(progress.updates(), 4);

    for stage in crate::STAGES {
        let update = Update::new(AdamWConfig::new().init())
            .reduce_in_learner(ZeroSettings::stage(stage))
            .and_then(|update| update.accumulate(AccumConfig::mean(4)));
        let update = update.unwrap();
        let (progress, scheduler) = (update.progress(), update.per_update(falling()));
        let strategy = Some(update.strategy().threads(2).into());
        let setup = Setup::new(repeated(&data, 2), 2);
        let ours: Outcome<Z> = train(start.clone(), update, scheduler, setup, strategy);
        assert_eq!(bits(&ours.model), bits(&alone.model), "{stage}");
        assert_eq!(progress.updates(), 4); // rank 0's
    }
}

/// Halves parameters after each step, as a model may in `TrainStep::optimize`: those that are
/// trained, or the others.
#[derive(Clone)]
struct Halving {
    inner: Update<Model<Z>, Z>,
    trained: bool,
}

impl<B: AutodiffBackend> ModuleMapper<B> for Halving {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        let trained = self.trained;
        param.map(|tensor| match tensor.is_require_grad() == trained {
            true => Tensor::from_inner(tensor.inner() * 0.5).set_require_grad(trained),
            false => tensor,
        })
    }
}

impl Optimizer<Model<Z>, Z> for Halving {
    type Record = UpdateRecord<Z>;

    fn step(&mut self, lr: f64, model: Model<Z>, gradients: GradientsParams) -> Model<Z> {
        let before = self.inner.updates();
        let model = Optimizer::step(&mut self.inner, lr, model, gradients);
        if self.inner.updates() == before {
            return model; // a request of the loop
        }
        model.map(self)
    }

    fn step_multi(&mut self, _: f64, _: Model<Z>, _: MultiGradientsParams) -> Model<Z> {
        unreachable!("a rank has one device")
    }

    fn to_record(&self) -> Self::Record {
        self.inner.to_record()
    }

    fn load_record(self, record: Self::Record) -> Self {
        let inner = self.inner.load_record(record);
        Self { inner, ..self }
    }
}

/// They are what is trained on, validated, recorded and returned.
#[test]
fn parameters_that_change_after_a_step_are_those_of_stage_2() {
    let _turn = crate::turn();
    let mut start = Model::<Z>::new();
    start.first = start.first.no_grad();
    for trained in [true, false] {
        let [expected, found] = [Stage::Gradients, Stage::Parameters].map(|stage| {
            let inner = crate::adamw::<Z>(stage);
            let strategy = Some(inner.strategy().threads(2).into());
            let halving = Halving { inner, trained };
            let setup = Setup::new(rows(0, 20), 2);
            train(start.clone(), halving, falling(), setup, strategy)
        });
        assert_eq!(found.watch.lines(), expected.watch.lines(), "{trained}");
        assert_eq!(bits(&found.model), bits(&expected.model), "{trained}");
        for epoch in 1..=2 {
            let records = found.directory.records(epoch);
            assert_eq!(records, expected.directory.records(epoch), "{trained}");
        }
    }
}
