//! A training with dropout and overflows on processes, broken off and resumed: its end is that of
//! one without a break.

use std::path::Path;
use std::sync::Arc;

use burn::lr_scheduler::LrScheduler;
use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::nn::{Dropout, DropoutConfig};
use burn::optim::AdamWConfig;
use burn::tensor::backend::Backend;
use burn_amp::{Autocast, F16, GradScalerConfig};
use burn_update::{Update, UpdateError};
use burn_zero::record::{Keep, TrainingState};
use burn_zero::{
    MpiGroup, ProcessGroup, RankReduction, ReduceOverRanks, Stage, Training, ZeroError,
};

use crate::launch;
use crate::nets::{B, Net, batch, contents, parameters, small_buckets};
use crate::training::digest;

type Mixed = Autocast<B, F16>;

const RANKS: usize = 2;
const STEPS: u64 = 60;
const SAVE_EVERY: u64 = 5;

/// Steps at which the loss of one rank is infinite.
const OVERFLOWS: [u64; 4] = [3, 17, 31, 52];

/// `STEP WHICH DIR`: trains from the last record in a directory up to a step, with the generator
/// seeded as at the record if `WHICH` is `restored`.
pub fn until(group: MpiGroup, arguments: &str) {
    let arguments: Vec<_> = arguments.splitn(3, ' ').collect();
    let until = arguments[0].parse().unwrap();
    let restored = arguments[1] == "restored";
    let weights = train(group, Path::new(arguments[2]), until, restored).unwrap();
    println!("weights {:x}", digest(&weights));
}

fn train(
    group: MpiGroup,
    dir: &Path,
    until: u64,
    restored: bool,
) -> Result<Vec<Vec<f32>>, ZeroError> {
    let device = Default::default();
    let (rank, ranks) = (group.rank(), group.world_size());
    Mixed::seed(&device, rank as u64);
    let reduction = RankReduction::new(small_buckets(Stage::Gradients), Arc::new(group))?;
    let prepared = || {
        let mut update = Update::new(AdamWConfig::new().init())
            .reduce_by(&reduction)?
            .scale(GradScalerConfig {
                init_scale: 1024.0,
                ..GradScalerConfig::default()
            })?;
        let model = update.prepare(Net::<Mixed>::new(&device))?;
        Ok::<_, UpdateError>((update, model))
    };
    let (update, model) = prepared().unwrap_or_else(|error| panic!("{error}"));
    let recorder = reduction.recorder()?;
    let run = Training {
        model,
        optimizer: update,
        scheduler: CosineAnnealingLrSchedulerConfig::new(0.02, STEPS as usize)
            .init()
            .unwrap(),
    };
    let (mut run, found) = recorder.load::<Mixed, _, _, _>(dir, None, run)?;
    // At each record the generator of each rank starts anew, from a seed in the record, so that a
    // resumed training draws the same.
    let seed = |state: &TrainingState| {
        let seed = state.user["seed"].as_u64().expect("a seed");
        Mixed::seed(&device, seed + rank as u64);
    };
    if let (Some(state), true) = (&found, restored) {
        seed(state);
    }
    let dropout: Dropout = DropoutConfig::new(0.3).init();
    for step in found.map_or(0, |state| state.step)..until {
        let x = dropout.forward(batch(step as usize, rank, ranks));
        let mut loss = run.model.loss(x);
        if OVERFLOWS.contains(&step) && step as usize % ranks == rank {
            loss = loss * f32::INFINITY;
        }
        let gradients = run.optimizer.backward(&run.model, loss);
        let updated = run
            .optimizer
            .step(run.scheduler.step(), run.model, gradients);
        run.model = updated.unwrap_or_else(|error| panic!("{error}"));
        if (step + 1) % SAVE_EVERY == 0 {
            let mut state = TrainingState::at_step(step + 1);
            state.user.insert("seed".into(), (1000 * step).into());
            seed(&state);
            recorder.save::<Mixed, _, _, _>(dir, run.by_ref(), state, Keep::default())?;
        }
    }
    Ok(parameters(&run.model))
}

/// Runs it up to each of the steps, one job after the other; the weights at the end, the same on
/// all ranks.
fn jobs(dir: &Path, which: &str, steps: &[u64]) -> String {
    let mut last = String::new();
    for step in steps {
        let program = format!("dropout until {step} {which} {}", dir.display());
        let job = launch::run(RANKS, &program);
        job.must_succeed();
        let weights = job.marked("weights ");
        assert_eq!((weights.len(), weights[0]), (RANKS, weights[1]));
        last = weights[0].to_owned();
    }
    last
}

pub fn a_training_with_dropout_is_broken_off_and_resumed() {
    let dirs = [(); 3].map(|()| tempfile::tempdir().unwrap());
    let [straight, broken, forgotten] = dirs.each_ref().map(tempfile::TempDir::path);
    let expected = jobs(straight, "restored", &[STEPS]);
    // What comes after the last record is lost and done again.
    assert_eq!(jobs(broken, "restored", &[18, 43, STEPS]), expected);
    let (ours, theirs) = (contents(straight), contents(broken));
    assert!(ours == theirs, "the last records differ");
    // It does draw.
    assert_ne!(jobs(forgotten, "forgotten", &[18, STEPS]), expected);
}
