//! 500 steps with random overflows, interrupted at random and resumed from records.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::optim::AdamWConfig;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, F16, GradScalerConfig};
use burn_update::Update;
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{ProcessGroup, RankReduction, ReduceOverRanks, Stage, Training, ZeroError};
use tempfile::tempdir;

use super::support::*;

type Mixed = Autocast<B, F16>;

const STEPS: u64 = 500;
const SAVE_EVERY: u64 = 25;
const RANKS: usize = 2;

/// Pseudo-random numbers below `limit`, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// The rank whose loss overflows, by step: about one step in fifteen.
fn overflows() -> BTreeMap<u64, usize> {
    let mut random = Random(0x5eed);
    let steps = (0..STEPS).filter_map(|step| {
        let rank = random.below(RANKS as u64) as usize;
        (random.below(15) == 0).then_some((step, rank))
    });
    steps.collect()
}

/// Trains until a step, from the last record in `dir` if there is one, and saves on the way. Ends
/// without saving: what was not saved by then is lost.
fn session<A: AutodiffBackend>(
    group: Arc<dyn ProcessGroup>,
    dir: &Path,
    until: u64,
    overflows: &BTreeMap<u64, usize>,
) -> Result<Vec<Vec<f32>>, ZeroError> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let reduction = RankReduction::new(small_buckets(Stage::Gradients), group)?;
    let config = GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: 12,
        ..GradScalerConfig::default()
    };
    let update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction);
    let mut update = update.unwrap().scale(config).unwrap();
    let model = update.prepare(Net::<A>::new(&Default::default())).unwrap();
    let recorder = reduction.recorder()?;
    let run = Training {
        model,
        optimizer: update,
        scheduler: CosineAnnealingLrSchedulerConfig::new(0.02, STEPS as usize)
            .init()
            .unwrap(),
    };
    let (mut run, found) = recorder.load::<A, _, _, _>(dir, None, run)?;
    let first = found.map_or(0, |state| state.step);
    for step in first..until {
        let mut loss = run.model.loss(batch(step as usize, rank, ranks));
        if overflows.get(&step) == Some(&rank) {
            loss = loss * f32::INFINITY;
        }
        let gradients = run.optimizer.backward(&run.model, loss);
        let updated = run
            .optimizer
            .step(run.scheduler.step(), run.model, gradients);
        run.model = updated.unwrap();
        let done = step + 1;
        if done % SAVE_EVERY == 0 {
            let state = TrainingState::at_step(done);
            recorder.save::<A, _, _, _>(dir, run.by_ref(), state, Keep::default())?;
        }
    }
    Ok(parameters(&run.model))
}

fn sessions<A: AutodiffBackend>(
    ranks: usize,
    dir: &Path,
    until: u64,
    overflows: &BTreeMap<u64, usize>,
) -> Vec<Vec<f32>> {
    let mut all = on_each_rank(ranks, |group| {
        session::<A>(group, dir, until, overflows).unwrap()
    });
    let last = all.pop().unwrap();
    assert!(all.into_iter().all(|other| other == last), "ranks differ");
    last
}

#[test]
fn the_end_is_that_of_the_uninterrupted_run() {
    let overflows = overflows();
    assert!(overflows.len() > 20, "{overflows:?}");
    let straight = tempdir().unwrap();
    let expected = sessions::<Mixed>(RANKS, straight.path(), STEPS, &overflows);

    let interrupted = tempdir().unwrap();
    let mut random = Random(0xdead);
    let mut until = 0;
    let mut found = Vec::new();
    while until < STEPS {
        until = (until + 60 + random.below(120)).min(STEPS);
        found = sessions::<Mixed>(RANKS, interrupted.path(), until, &overflows);
    }
    assert_eq!(expected, found);
    let (ours, theirs) = (contents(straight.path()), contents(interrupted.path()));
    assert_eq!(ours.1, theirs.1);
    assert!(ours.0 == theirs.0, "moments differ");
    let skipped = ours
        .1
        .optimizer
        .pointer("/parts/scale/values/skipped/Integer");
    let skipped = skipped.and_then(serde_json::Value::as_u64).unwrap();
    // The scale grows until the model itself overflows, too.
    assert!(skipped >= overflows.len() as u64, "{skipped}");
}

#[test]
fn other_numbers_of_ranks_go_on_from_it_to_rounding() {
    const SAVED: u64 = 50;
    const FURTHER: u64 = SAVED + 20;
    let none = BTreeMap::new();
    let go_on = |ranks: usize| {
        let dir = tempdir().unwrap();
        sessions::<B>(RANKS, dir.path(), SAVED, &none);
        sessions::<B>(ranks, dir.path(), FURTHER, &none)
    };
    let expected = go_on(RANKS);
    for ranks in [1, 3, 4] {
        let distance = distance(&expected, &go_on(ranks));
        assert!(distance < 1e-4, "{ranks} ranks: {distance}");
    }
}
