//! What an update over ranks promises in the Learner: Burn's own training, with any number of ranks.
//!
//! The Learner that is watched, its model and its data are those of burn-accum's strategy. Every
//! backend has one random generator for the whole process, so each test here takes its turn.

#![allow(dead_code)] // of burn-accum's files, which have more than is needed here

mod average;
mod burns;
mod carried;
#[path = "../../../burn-ranks/tests/ranks/child.rs"]
mod child;
mod cut_off;
#[path = "../../../burn-accum/tests/strategy/equal.rs"]
mod equal;
mod frozen;
mod guide;
mod handle;
mod items;
mod layers;
#[path = "../../../burn-accum/tests/strategy/learner.rs"]
mod learner;
mod loader;
#[path = "../../../burn-accum/tests/strategy/model.rs"]
mod model;
mod processes;
mod ranks;
mod refused;
mod resumed;
mod sampled;
mod statistics;
mod tied;
mod update;
mod variants;
#[path = "../../../burn-accum/tests/strategy/watch.rs"]
mod watch;
mod wide;

use burn::lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig};
use burn::optim::AdamWConfig;
use burn::{backend::Autodiff, tensor::backend::AutodiffBackend};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_update::Update;
use burn_zero::{ReduceOverRanks, Sharded, Stage, ZeroSettings};

use learner::{Outcome, Setup, train, turn};
use model::{Model, Row};

/// What ranks train on.
type Z = Sharded<Autodiff<Remat<Flex>>>;

const STAGES: [Stage; 4] = [
    Stage::DataParallel,
    Stage::OptimizerState,
    Stage::Gradients,
    Stage::Parameters,
];

fn falling() -> impl LrScheduler + 'static {
    LinearLrSchedulerConfig::new(0.1, 0.01, 40).init().unwrap()
}

fn adamw<B: AutodiffBackend>(stage: Stage) -> Update<Model<B>, B> {
    let sharding = ZeroSettings {
        bucket_elements: 20,
        ..ZeroSettings::stage(stage)
    };
    let update = Update::new(AdamWConfig::new().init());
    update.reduce_in_learner(sharding).unwrap()
}

/// Trains with AdamW on so many threads.
fn on_ranks(ranks: usize, stage: Stage, start: &Model<Z>, setup: Setup) -> Outcome<Z> {
    let update = adamw::<Z>(stage);
    let strategy = update.strategy().threads(ranks);
    train(
        start.clone(),
        update,
        falling(),
        setup,
        Some(strategy.into()),
    )
}

/// Trains with AdamW in an update without ranks, which is Burn's training: `burns` shows it.
fn without_ranks<B: AutodiffBackend>(start: &Model<B>, setup: Setup) -> Outcome<B> {
    let update = Update::new(AdamWConfig::new().init());
    let strategy = update.strategy();
    train(
        start.clone(),
        update,
        falling(),
        setup,
        Some(strategy.into()),
    )
}

/// As often as there are ranks: each gets all of it, and the mean over the ranks is that of one.
fn repeated(rows: &[Row], ranks: usize) -> Vec<Row> {
    rows.repeat(ranks)
}
