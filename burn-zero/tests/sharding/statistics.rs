//! Running statistics, which clones of a module share: each rank has its own, and all have rank 0's
//! where they must.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{AutodiffModule, Module};
use burn::nn::{BatchNorm, BatchNormConfig, Linear, LinearConfig, LinearLayout};
use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn::prelude::*;
use burn_ranks::Operation;
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{GroupOptions, ProcessGroup, Stage, ThreadGroup, Training};
use tempfile::tempdir;

use super::support::*;

/// A lock that one rank holds while it waits for another would cost this.
const DEADLINE: Duration = Duration::from_secs(3);

fn hasty<R: Send>(ranks: usize, rank: impl Fn(Arc<dyn ProcessGroup>) -> R + Sync) -> Vec<R> {
    let options = GroupOptions::with_deadline(DEADLINE);
    ThreadGroup::spawn(ranks, options, |group| rank(Arc::new(group))).unwrap()
}

#[derive(Module, Debug)]
struct Normed<B: Backend> {
    linear: Linear<B>,
    norm: BatchNorm<B>,
    frozen: Linear<B>,
}

impl Normed<B> {
    fn new(seed: usize) -> Self {
        let device = Default::default();
        let linear = |seed, layout| {
            let config = LinearConfig::new(7, 5).with_bias(false);
            let mut linear = config.with_layout(layout).init::<B>(&device);
            let [rows, columns] = linear.weight.dims();
            let weight = values(rows * columns, seed);
            let weight = Tensor::<B, 1>::from_data(weight.as_slice(), &device);
            linear.weight = linear
                .weight
                .map(|_| weight.reshape([rows, columns]).require_grad());
            linear
        };
        Self {
            // Its weight has a mapper, through which it goes into records.
            linear: linear(seed, LinearLayout::Col),
            norm: BatchNormConfig::new(5).init(&device),
            frozen: linear(seed + 1, LinearLayout::Row).no_grad(),
        }
    }

    fn loss(&self, x: Tensor<B, 2>) -> Tensor<B, 1> {
        let y = self.linear.forward(x.clone()) + self.frozen.forward(x);
        self.norm.forward(y).powi_scalar(4).mean()
    }

    /// Trained, frozen, and running statistics with what is pending of them.
    fn all(&self) -> Vec<Vec<f32>> {
        parameters(&self.valid())
    }
}

fn train(
    mut model: Normed<B>,
    optimizer: &mut impl Optimizer<Normed<B>, B>,
    steps: Range<usize>,
    group: &dyn ProcessGroup,
) -> Normed<B> {
    for step in steps {
        let loss = model.loss(batch(step, group.rank(), group.world_size()));
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(0.05, model, gradients);
    }
    model
}

/// What each rank ends with.
fn trained(
    ranks: usize,
    stage: Stage,
    model: impl Fn(usize) -> Normed<B> + Sync,
) -> Vec<Vec<Vec<f32>>> {
    hasty(ranks, |group| {
        let adam = AdamWConfig::new().init();
        let mut update = over_ranks(adam, group.clone(), small_buckets(stage)).unwrap();
        let model = update.prepare(model(group.rank())).unwrap();
        train(model, &mut update, 0..3, &*group).all()
    })
}

#[test]
fn clones_of_one_model_are_models_of_their_own() {
    for stage in WITH_PARAMETERS {
        for ranks in [2, 3] {
            let initial = Normed::new(1);
            let before = initial.all();
            let clones = trained(ranks, stage, |_| initial.clone());
            assert_eq!(initial.all(), before, "nobody trains the original");
            let made = trained(ranks, stage, |rank| Normed::new(1 + rank));
            assert_eq!(clones, made, "{stage} on {ranks}");
            // Each rank has the statistics of its own batches, and nothing else of its own.
            let differ = clones[0].iter().zip(&clones[1]).map(|(a, b)| a != b);
            let expected = [false, false, false, true, true, false];
            assert_eq!(differ.collect::<Vec<_>>(), expected);
        }
    }
}

#[test]
fn what_else_a_parameter_has_stays() {
    let initial = Normed::new(1);
    let in_record = |model: &Normed<B>| model.linear.weight.clone().into_record().dims();
    let expected = in_record(&initial);
    assert_ne!(initial.linear.weight.dims(), expected, "it is mapped");
    let found = hasty(2, |group| {
        let adam = AdamWConfig::new().init();
        let sharding = small_buckets(Stage::Gradients);
        let mut update = over_ranks(adam, group, sharding).unwrap();
        let model = update.prepare(initial.clone()).unwrap();
        assert_eq!(model.linear.weight.id, initial.linear.weight.id);
        assert!(!model.frozen.weight.is_require_grad() && model.linear.weight.is_require_grad());
        in_record(&model)
    });
    assert_eq!(found, [expected; 2]);
}

/// After a save as after a load: who goes on has what who resumes has.
#[test]
fn a_record_is_of_one_model() {
    let dir = tempdir().unwrap();
    let run = |resumes: bool| {
        hasty(2, |group| {
            let adam = AdamWConfig::new().init();
            let sharding = small_buckets(Stage::Gradients);
            let (mut update, reduction) = reduced(adam, group.clone(), sharding).unwrap();
            let seed = if resumes { 5 } else { 1 };
            let model = update.prepare(Normed::new(seed)).unwrap();
            let recorder = reduction.recorder().unwrap();
            let mut training = Training {
                model,
                optimizer: update,
                scheduler: 0.05,
            };
            if resumes {
                let loaded = recorder.load::<B, _, _, _>(dir.path(), None, training);
                training = loaded.unwrap().0;
            } else {
                training.model = train(training.model, &mut training.optimizer, 0..3, &*group);
                let state = TrainingState::at_step(3);
                let saved = recorder.save::<B, _, _, _>(
                    dir.path(),
                    training.by_ref(),
                    state,
                    Keep::default(),
                );
                saved.unwrap();
            }
            let at_record = training.model.all();
            let end = train(training.model, &mut training.optimizer, 3..5, &*group).all();
            [at_record, end]
        })
    };
    let straight = run(false);
    assert_eq!(straight[0][0], straight[1][0], "one model");
    assert_eq!(run(true), straight);
}

#[test]
fn all_ranks_get_those_of_the_first_in_one_collective() {
    let found = hasty(3, |group| {
        let adam = AdamWConfig::new().init();
        let sharding = small_buckets(Stage::OptimizerState);
        let (mut update, reduction) = reduced(adam, group.clone(), sharding).unwrap();
        let model = update.prepare(Normed::new(1)).unwrap();
        let model = train(model, &mut update, 0..3, &*group);
        let own = model.all();
        let before = group.traffic().of(Operation::Broadcast);
        reduction.share_statistics::<B, _>(&model).unwrap();
        let after = group.traffic().of(Operation::Broadcast);
        assert_eq!(after.calls - before.calls, 1);
        // The frozen weight stays at home. Two statistics of five elements are cut into 4, 3 and 3:
        // each rank sends its part to both others, after rank 0 has sent the others theirs.
        let sent = [3 + 3 + 2 * 4, 2 * 3, 2 * 3][group.rank()];
        assert_eq!(after.elements - before.elements, sent);
        // They are what the next update starts from.
        let shared = model.all();
        let end = train(model, &mut update, 3..4, &*group).all();
        (own, shared, end)
    });
    for (_, shared, end) in &found {
        assert_eq!(*shared, found[0].0);
        assert_eq!(end[0], found[0].2[0]);
    }
}

/// PyTorch's `DistributedDataParallel` broadcasts buffers before each forward. A forward pass in
/// training does not read running statistics, so rank 0's, which all ranks have at the end, are the
/// same without.
#[test]
fn shared_at_the_end_they_are_those_that_are_shared_before_each_forward() {
    let run = |as_pytorch: bool| {
        on_ranks(2, |group| {
            let adam = AdamWConfig::new().init();
            let sharding = small_buckets(Stage::Gradients);
            let (mut update, reduction) = reduced(adam, group.clone(), sharding)?;
            let mut model = update.prepare(Normed::new(1))?;
            for step in 0..4 {
                if as_pytorch {
                    reduction.share_statistics::<B, _>(&model)?;
                }
                model = train(model, &mut update, step..step + 1, &*group);
            }
            reduction.share_statistics::<B, _>(&model)?;
            Ok(model.all())
        })
    };
    assert_eq!(run(false), run(true));
}

/// Nothing is sent for a model that has none.
#[test]
fn without_any_it_costs_nothing() {
    hasty(2, |group| {
        let adam = AdamWConfig::new().init();
        let sharding = small_buckets(Stage::Gradients);
        let (mut update, reduction) = reduced(adam, group.clone(), sharding).unwrap();
        let model = update.prepare(Net::<B>::new(&Default::default())).unwrap();
        let before = group.traffic();
        reduction.share_statistics::<B, _>(&model).unwrap();
        assert_eq!(group.traffic(), before);
    });
}
