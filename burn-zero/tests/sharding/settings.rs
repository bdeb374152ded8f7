//! Ranks that do not do the same are told so, with both sides, before it does harm.

use std::sync::Arc;

use burn::optim::{AdamWConfig, GradientsParams, Optimizer};
use burn_zero::{
    GroupFault, GroupOptions, ProcessGroup, Stage, ThreadGroup, ZeroError, ZeroOptimizer,
};

use super::support::*;

const ITERATIONS: usize = 6;
/// Where a rank differs.
const AT: usize = 3;

/// What a loop does in an iteration: whether it takes part, and with which learning rate.
type Iteration = fn(usize, usize) -> Option<f64>;

/// Runs a loop of one's own on two ranks.
fn run(stage: Stage, iteration: Iteration) -> Result<Vec<Vec<Vec<f32>>>, ZeroError> {
    let weights = ThreadGroup::spawn(2, GroupOptions::default(), |group| {
        let rank = group.rank();
        let group: Arc<dyn ProcessGroup> = Arc::new(group);
        let adam = AdamWConfig::new().init();
        let mut optimizer = ZeroOptimizer::new(adam, group, small_buckets(stage))?;
        let mut model = optimizer.prepare::<B, _>(Net::new(&Default::default()))?;
        for step in 0..ITERATIONS {
            let Some(lr) = iteration(step, rank) else {
                continue; // an empty batch, say
            };
            let loss = model.loss(batch(step, rank, 2));
            let gradients = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(lr, model, gradients);
        }
        Ok(parameters(&model))
    });
    weights?.into_iter().collect()
}

/// Steps panic with their errors: the first comes here.
fn told(stage: Stage, iteration: Iteration) -> String {
    match run(stage, iteration) {
        Err(ZeroError::Group(GroupFault::PeerPanicked { message, .. })) => message,
        other => panic!("{stage:?}: {other:?}"),
    }
}

#[test]
fn a_learning_rate_that_differs_stops_the_step() {
    for stage in STAGES {
        let message = told(stage, |step, rank| {
            Some(if step == AT && rank == 1 { 0.1 } else { 0.05 })
        });
        // No weight was changed by it: it is found before any parameter is gathered.
        let sides = ["step 4, lr 0.05 (", "step 4, lr 0.1 ("];
        assert!(
            message.contains("ranks differ: rank ") && sides.iter().all(|s| message.contains(s)),
            "{stage:?}: {message}"
        );
    }
}

#[test]
fn so_does_the_last_bit_of_it() {
    let message = told(Stage::Gradients, |_, rank| {
        Some(if rank == 1 { 0.05_f64.next_up() } else { 0.05 })
    });
    assert!(
        message.contains("lr 0.05 (") && message.contains("lr 0.05000000000000001 ("),
        "{message}"
    );
}

/// A rank that leaves out an iteration altogether makes as many calls as the others until the end.
#[test]
fn a_rank_that_leaves_out_an_iteration_is_told_by_its_schedule() {
    for stage in STAGES {
        let message = told(stage, |step, rank| {
            (step != AT || rank != 1).then(|| 0.1 / (1 + step) as f64)
        });
        assert!(
            message.contains("step 4, lr 0.025 (") && message.contains("step 4, lr 0.02 ("),
            "{stage:?}: {message}"
        );
    }
}

/// Where that does not change it has trained on with its next batch, on the same weights as all: no garbage, and at the end too few steps.
#[test]
fn or_at_the_end_which_says_after_which_step() {
    for stage in STAGES {
        let message = match run(stage, |step, rank| {
            (step != AT || rank != 1).then_some(0.05)
        }) {
            Err(error) => error.to_string(),
            Ok(_) => panic!("{stage:?}: it was not found"),
        };
        let at = match stage {
            Stage::Gradients => "after step 5 (",
            _ => "step 6, lr 0.05 (",
        };
        assert!(
            message.contains("rank 1 left after") && message.contains(at),
            "{stage:?}: {message}"
        );
    }
}
