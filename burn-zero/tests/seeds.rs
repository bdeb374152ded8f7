//! Random numbers of a rank's own: dropout on several ranks is the same in every run.
//!
//! Every backend has one random generator for the whole process, so each test here takes its turn.

#[path = "sharding/support.rs"]
#[allow(dead_code, reason = "the laws on threads use the rest")]
mod support;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::nn::{Dropout, DropoutConfig};
use burn::optim::AdamWConfig;
use burn::prelude::*;
use burn::tensor::Distribution;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, Bf16};
use burn_flex::Flex;
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    ProcessGroup, RankReduction, ReduceOverRanks, ShardingFault, SingleRank, Stage, Training,
    ZeroError,
};

use support::*;

/// A turn with the random generator.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn dropped<B: Backend>(x: Tensor<B, 2>) -> Tensor<B, 2> {
    let dropout: Dropout = DropoutConfig::new(0.4).init();
    dropout.forward(x)
}

fn reduced_by<B: AutodiffBackend>(reduction: &RankReduction) -> Update<Net<B>, B> {
    let update = Update::new(AdamWConfig::new().init());
    update.reduce_by(reduction).unwrap()
}

/// Three steps, of which each draws a mask of its own.
fn train<B: AutodiffBackend>(
    group: Arc<dyn ProcessGroup>,
    stage: Stage,
    seed: Option<u64>,
) -> Result<Vec<Vec<f32>>, UpdateError> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let mut reduction = RankReduction::new(small_buckets(stage), group)?;
    if let Some(seed) = seed {
        reduction = reduction.with_seed(seed);
    }
    let mut update = reduced_by(&reduction);
    let mut model = update.prepare(Net::<B>::new(&Default::default()))?;
    for step in 0..3 {
        let loss = model.loss(dropped(batch(step, rank, world_size)));
        let gradients = update.backward(&model, loss);
        model = update.step(0.05, model, gradients)?;
    }
    Ok(parameters(&model))
}

fn ranks<B: AutodiffBackend>(stage: Stage, seed: u64) -> Vec<Vec<f32>> {
    on_ranks(4, |group| train::<B>(group, stage, Some(seed)))
}

#[test]
fn runs_and_stages_are_one_another_bit_for_bit() {
    let _turn = turn();
    let first = ranks::<B>(Stage::DataParallel, 7);
    for stage in STAGES {
        for _ in 0..5 {
            assert_eq!(ranks::<B>(stage, 7), first, "{stage:?}");
        }
        assert_eq!(
            ranks::<Autocast<B, Bf16>>(stage, 7),
            ranks::<Autocast<B, Bf16>>(Stage::DataParallel, 7),
            "{stage:?}"
        );
    }
    assert_ne!(ranks::<B>(Stage::DataParallel, 8), first);
}

/// What each rank draws, while others of the process do and one of them is none.
fn drawn(reseeds: bool) -> Vec<Vec<Vec<f32>>> {
    let device = Default::default();
    let draw = || -> Vec<f32> {
        let numbers = Tensor::<B, 1>::random([5], Distribution::Default, &device);
        numbers.into_data().iter().collect()
    };
    on_each_rank(3, |group| {
        let rank = group.rank();
        let reduction = RankReduction::new(small_buckets(Stage::Gradients), group);
        let mut update = reduced_by(&reduction.unwrap().with_seed(7));
        let model = update.prepare(Net::<B>::new(&device)).unwrap();
        if rank == 2 {
            std::thread::scope(|scope| scope.spawn(|| (0..50).for_each(|_| drop(draw()))).join())
                .unwrap();
        }
        let mut drawn: Vec<_> = (0..20).map(|_| draw()).collect();
        if reseeds {
            <B as Backend>::seed(&device, 11);
            drawn.extend((0..20).map(|_| draw()));
            <B as Backend>::seed(&device, 11);
            drawn.extend((0..20).map(|_| draw()));
        }
        drop((update, model));
        drawn
    })
}

#[test]
fn ranks_draw_their_own_numbers_and_seed_them_anew() {
    let _turn = turn();
    let first = drawn(true);
    assert_eq!(drawn(true), first);
    let short: Vec<_> = first.iter().map(|rank| rank[..20].to_vec()).collect();
    assert_eq!(drawn(false), short);
    for drawn in &first {
        assert_eq!(drawn[20..40], drawn[40..]);
    }
    // No numbers come twice.
    let mut all: Vec<_> = first.iter().flat_map(|drawn| &drawn[..40]).collect();
    all.sort_by(|a, b| a.partial_cmp(b).unwrap());
    assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
}

/// Where there is one rank, and after a training, the generator is Burn's.
#[test]
fn others_draw_as_ever() {
    let _turn = turn();
    let device = Default::default();
    let group = Arc::new(SingleRank::new());
    let reduction = RankReduction::new(small_buckets(Stage::Gradients), group);
    let mut update = reduced_by(&reduction.unwrap().with_seed(7));
    let model = update.prepare(Net::<B>::new(&device)).unwrap();
    let seeded = || {
        <B as Backend>::seed(&device, 3);
        let ours = Tensor::<B, 1>::random([3], Distribution::Default, &device).into_data();
        <Flex as Backend>::seed(&device, 3);
        let burns = Tensor::<Flex, 1>::random([3], Distribution::Default, &device).into_data();
        ours == burns
    };
    assert!(seeded());
    drop((update, model));
    assert!(seeded());
}

/// Saves after two steps and takes two more; or resumes there, if there is a record.
fn saved_and_resumed(world_size: usize, dir: &Path) -> Vec<Vec<Vec<f32>>> {
    let trained = on_each_rank(world_size, |group| {
        let (rank, device) = (group.rank(), Default::default());
        let settings = small_buckets(Stage::OptimizerState);
        let reduction = RankReduction::new(settings, group)?.with_seed(7);
        let mut update = reduced_by(&reduction);
        let model = update.prepare(Net::<B>::new(&device)).unwrap();
        let recorder = reduction.recorder()?;
        let training = Training {
            model,
            optimizer: update,
            scheduler: 0.05,
        };
        let (mut training, found) = recorder.load::<B, _, _, _>(dir, None, training)?;
        let seed_again = |state: &TrainingState| <B as Backend>::seed(&device, state.step);
        found.iter().for_each(seed_again);
        if rank == 1 && found.is_none() {
            drop(dropped::<B>(batch(0, rank, world_size))); // ranks need not draw equally often
        }
        for step in found.map_or(0, |state| state.step)..4 {
            let x = dropped(batch(step as usize, rank, world_size));
            let loss = training.model.loss(x);
            let gradients = training.optimizer.backward(&training.model, loss);
            let updated = training.optimizer.step(0.05, training.model, gradients);
            training.model = updated.unwrap();
            if step == 1 {
                let state = TrainingState::at_step(2);
                seed_again(&state);
                recorder.save::<B, _, _, _>(dir, training.by_ref(), state, Keep::default())?;
            }
        }
        Ok::<_, ZeroError>(parameters(&training.model))
    });
    trained.into_iter().map(Result::unwrap).collect()
}

#[test]
fn a_resumed_training_draws_what_the_uninterrupted_one_does() {
    let _turn = turn();
    let dir = tempfile::tempdir().unwrap();
    let straight = saved_and_resumed(2, dir.path());
    assert_eq!(saved_and_resumed(2, dir.path()), straight);
    // Any number of ranks goes on from it.
    let three = saved_and_resumed(3, dir.path());
    assert_eq!(saved_and_resumed(3, dir.path()), three);
}

#[test]
fn the_backend_must_be_able_to() {
    let _turn = turn();
    let error = on_ranks(2, |group| {
        let refused = train::<Plain>(group, Stage::OptimizerState, Some(7)).err();
        Ok(refused.as_ref().and_then(refused_by_reduction).cloned())
    });
    assert!(
        matches!(
            &error,
            Some(ShardingFault::NotSharded { what, .. })
                if what.contains("with_seed")
        ),
        "{error:?}"
    );
}
