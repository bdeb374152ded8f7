//! Sharded training on ranks that are processes, and on threads to compare with.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use burn::backend::Autodiff;
use burn::optim::AdamWConfig;
use burn::tensor::backend::AutodiffBackend;
use burn_amp::{Autocast, Bf16};
use burn_checkpoint::Remat;
use burn_flex::Flex;
use burn_ranks::{Job, Member};
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    MpiGroup, ProcessGroup, RankReduction, Recorder, ReduceOverRanks, Sharded, SingleRank, Stage,
    Training, ZeroError,
};

use crate::launch::signal;
use crate::nets::{B, Net, STAGES, batch, on_ranks, over_ranks, parameters, small_buckets};

pub const STEPS: usize = 4;

/// Gathers units in stage 3.
type Units = Sharded<Autodiff<Remat<Flex>>>;

type Run<A> = Training<Net<A>, Update<Net<A>, A>, f64>;

fn build<A: AutodiffBackend>(
    group: Arc<dyn ProcessGroup>,
    stage: Stage,
) -> Result<(Run<A>, Recorder), UpdateError> {
    let reduction = RankReduction::new(small_buckets(stage), group)?;
    let mut update = Update::new(AdamWConfig::new().init()).reduce_by(&reduction)?;
    let training = Training {
        model: update.prepare(Net::new(&Default::default()))?,
        optimizer: update,
        scheduler: 0.05,
    };
    Ok((training, reduction.recorder()?))
}

fn step<A: AutodiffBackend>(group: &dyn ProcessGroup, mut run: Run<A>, step: usize) -> Run<A> {
    let (rank, ranks) = (group.rank(), group.world_size());
    let loss = run.model.loss(batch(step, rank, ranks));
    let gradients = run.optimizer.backward(&run.model, loss);
    let updated = run.optimizer.step(run.scheduler, run.model, gradients);
    run.model = updated.unwrap_or_else(|error| panic!("{error}"));
    run
}

/// Steps from the first.
fn steps<A: AutodiffBackend>(group: &dyn ProcessGroup, run: Run<A>, steps: usize) -> Run<A> {
    (0..steps).fold(run, |run, at| step(group, run, at))
}

/// Sensitive to every bit.
pub fn digest(parameters: &[Vec<f32>]) -> u64 {
    let elements = parameters.iter().flatten();
    elements.fold(0, |digest: u64, element| {
        (digest ^ u64::from(element.to_bits()))
            .wrapping_mul(0x0100_0000_01b3)
            .rotate_left(7)
    })
}

fn digest_of<A: AutodiffBackend>(
    group: &Arc<dyn ProcessGroup>,
    stage: Stage,
) -> Result<u64, UpdateError> {
    let (run, _) = build::<A>(group.clone(), stage)?;
    Ok(digest(&parameters(&steps(&**group, run, STEPS).model)))
}

/// What training in each stage gives, in f32 and under bf16 autocast.
pub fn digests(group: &Arc<dyn ProcessGroup>) -> Result<Vec<String>, UpdateError> {
    let mut found = Vec::new();
    for stage in STAGES {
        let (full, low) = (
            digest_of::<B>(group, stage)?,
            digest_of::<Autocast<B, Bf16>>(group, stage)?,
        );
        found.push(format!("{stage:?} {full:x} {low:x}"));
    }
    if group.world_size() > 1 {
        let (stage, group) = (Stage::Parameters, group.clone());
        let (full, low) = (
            digest_of::<Units>(&group, stage)?,
            digest_of::<Autocast<Units, Bf16>>(&group, stage)?,
        );
        // The bits of stage 2.
        let digests = format!("{full:x} {low:x}");
        assert!(
            found.last().is_some_and(|of_2| of_2.ends_with(&digests)),
            "{found:?}, {digests}"
        );
        found.push(format!("{stage:?} {digests}"));
    }
    Ok(found)
}

pub fn print_digests(group: Arc<dyn ProcessGroup>) {
    for digest in digests(&group).unwrap() {
        println!("trained {digest}");
    }
}

/// Trains and saves after every step until a rank is killed, some time after the first record.
pub fn save_until_killed(group: MpiGroup, arguments: &str) {
    let arguments: Vec<_> = arguments.splitn(3, ' ').collect();
    let victim: usize = arguments[0].parse().unwrap();
    let after = Duration::from_micros(arguments[1].parse().unwrap());
    let dir = Path::new(arguments[2]);
    let rank = group.rank();
    let group: Arc<dyn ProcessGroup> = Arc::new(group);
    let (run, recorder) = build::<B>(group.clone(), Stage::Gradients).unwrap();
    let (mut run, found) = recorder.load::<B, _, _, _>(dir, None, run).unwrap();
    let first = found.map_or(0, |state| state.step);
    for at in first.. {
        run = step(&*group, run, at as usize);
        let state = TrainingState::at_step(at + 1);
        let saved = recorder.save::<B, _, _, _>(dir, run.by_ref(), state, Keep::default());
        if let Err(error) = saved {
            println!("rank {rank}: {error}");
            std::process::exit(1);
        }
        if rank == 0 {
            println!("saved {}", at + 1);
        }
        if at == first && rank == victim {
            thread::spawn(move || {
                thread::sleep(after);
                signal("-KILL");
            });
        }
    }
}

/// Loads the last record of one directory, or trains a little if there is none, and saves into
/// another.
pub fn carry(group: MpiGroup, arguments: &str) {
    let (from, to) = arguments.split_once(' ').unwrap();
    let group: Arc<dyn ProcessGroup> = Arc::new(group);
    let (run, recorder) = build::<B>(group.clone(), Stage::Gradients).unwrap();
    let resumed = recorder
        .load::<B, _, _, _>(Path::new(from), None, run)
        .unwrap();
    let (run, state) = match resumed {
        (run, Some(state)) => (run, state),
        (run, None) => (
            steps(&*group, run, STEPS),
            TrainingState::at_step(STEPS as u64),
        ),
    };
    let to = Path::new(to);
    recorder
        .save::<B, _, _, _>(to, run.by_ref(), state, Keep::All)
        .unwrap();
}

/// The last record of a directory, loaded by one rank.
pub struct Found {
    pub step: u64,
    pub weights: Vec<Vec<f32>>,
}

pub fn loaded(dir: &Path) -> Found {
    let load = || -> Result<Found, ZeroError> {
        let alone = Arc::new(SingleRank::new());
        let (run, recorder) = build::<B>(alone, Stage::Gradients).expect("one rank");
        let (run, state) = recorder.load::<B, _, _, _>(dir, None, run)?;
        Ok(Found {
            step: state.expect("there is a record").step,
            weights: parameters(&run.model),
        })
    };
    load().unwrap()
}

/// What as many threads have after so many steps.
pub fn weights_after(ranks: usize, number: u64) -> Vec<Vec<f32>> {
    on_ranks(ranks, |group| {
        let (run, _) = build::<B>(group.clone(), Stage::Gradients)?;
        Ok(parameters(&steps(&*group, run, number as usize).model))
    })
}

/// A rank that kills itself in its second step, when it has given some buckets to its group, and
/// others are to come.
#[derive(Debug)]
struct KillsItself {
    inner: MpiGroup,
    /// Jobs until then, once it is known when that is.
    jobs: AtomicUsize,
}

impl ProcessGroup for KillsItself {
    fn member(&self) -> &Member {
        self.inner.member()
    }

    fn submit(&self, job: Job) {
        self.inner.submit(job);
        if self.jobs.fetch_sub(1, Ordering::Relaxed) == 1 && self.inner.rank() == 1 {
            signal("-KILL");
        }
    }
}

pub fn killed_in_backward(group: MpiGroup) {
    killed_in_the_second_step::<B>(group, Stage::Gradients);
}

/// In the forward pass, whose first use of a parameter gathers all of them, bucket by bucket.
pub fn killed_in_a_gather(group: MpiGroup) {
    killed_in_the_second_step::<Units>(group, Stage::Parameters);
}

fn killed_in_the_second_step<A: AutodiffBackend>(group: MpiGroup, stage: Stage) {
    let rank = group.rank();
    let group = Arc::new(KillsItself {
        inner: group,
        jobs: AtomicUsize::new(usize::MAX),
    });
    let (mut run, _) = build::<A>(group.clone(), stage).unwrap();
    let buckets = parameters(&run.model).iter().map(Vec::len).sum::<usize>() / 40;
    for at in 0..3 {
        if at == 1 {
            group.jobs.store(buckets / 2, Ordering::Relaxed);
        }
        run = step(&*group, run, at);
        println!("step {} of rank {rank}", at + 1);
    }
}

/// The second rank's learning rate differs in a step.
pub fn differs(group: MpiGroup) {
    let second = group.rank() == 1;
    let member: Arc<dyn ProcessGroup> = Arc::new(group.clone());
    let adam = AdamWConfig::new().init();
    let sharding = small_buckets(Stage::Gradients);
    let mut update = over_ranks(adam, member, sharding).unwrap();
    let net = Net::<B>::new(&Default::default());
    let mut model = update.prepare(net).unwrap();
    for iteration in 0..6 {
        let lr = if second && iteration == 3 { 0.1 } else { 0.05 };
        let loss = model.loss(batch(iteration, group.rank(), 2));
        let gradients = update.backward(&model, loss);
        let updated = update.step(lr, model, gradients);
        model = updated.unwrap_or_else(|error| panic!("{error}"));
    }
}
