//! What the training loop of an update promises: Burn's own training, in epochs or in updates, that
//! goes on where it was stopped.
//!
//! The Learner that is watched, its model and its data are those of burn-accum's strategy. Every
//! backend has one random generator for the whole process, so each test here takes its turn.

#![allow(dead_code)] // of burn-accum's files, which have more than is needed here

mod average;
mod by_updates;
#[path = "../../../burn-accum/tests/strategy/equal.rs"]
mod equal;
#[path = "../../../burn-accum/tests/strategy/learner.rs"]
mod learner;
mod loaders;
mod metrics;
#[path = "../../../burn-accum/tests/strategy/model.rs"]
mod model;
mod refused;
mod resumed;
mod same;
#[path = "../../../burn-accum/tests/strategy/watch.rs"]
mod watch;

use burn::lr_scheduler::linear::{LinearLrScheduler, LinearLrSchedulerConfig};
use burn::optim::AdamWConfig;
use burn_accum::AccumConfig;
use burn_update::{Update, UpdateStrategy};

use learner::{B, Components, Outcome, Setup, train, turn};
use model::{Model, rows};

type Trained = Update<Model<B>, B>;

/// An update of windows of so many micro-batches.
fn windows(micro_batches: usize) -> Trained {
    let adam = AdamWConfig::new().with_weight_decay(0.1).init();
    let windows = AccumConfig::mean(micro_batches);
    Update::new(adam).accumulate(windows).unwrap()
}

fn falling() -> LinearLrScheduler {
    LinearLrSchedulerConfig::new(0.1, 0.01, 40).init().unwrap()
}

/// 22 rows, which are 6 micro-batches, in another order in each epoch.
fn shuffled(epochs: usize) -> Setup {
    let mut setup = Setup::new(rows(0, 22), epochs);
    setup.shuffle = Some(3);
    setup
}

type Strategy = UpdateStrategy<Components<B, Trained, LinearLrScheduler>>;

/// Trains with windows of two micro-batches.
fn trained(start: &Model<B>, setup: Setup, how: impl FnOnce(Strategy) -> Strategy) -> Outcome<B> {
    trained_in(2, start, setup, how)
}

/// Trains with windows of so many micro-batches. The learning rate falls with each micro-batch, so
/// that it is another one if a resumed training counts them differently.
fn trained_in(
    micro_batches: usize,
    start: &Model<B>,
    setup: Setup,
    how: impl FnOnce(Strategy) -> Strategy,
) -> Outcome<B> {
    let update = windows(micro_batches);
    let strategy = how(update.strategy());
    train(
        start.clone(),
        update,
        falling(),
        setup,
        Some(strategy.into()),
    )
}
