//! Layers around and in the sharded optimizer: each rank has its own, and they decide alike.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use burn::lr_scheduler::{LrScheduler, constant::ConstantLr};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn::train::Learner;
use burn_accum::{AccumConfig, MultiSteps};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_zero::{Partition, ReduceOp, ZeroOptimizer, ZeroSettings, ZeroStrategy};

use crate::learner::{Components, MICRO_BATCH, Outcome, Setup, train, train_shown};
use crate::model::{Model, Row, assert_close, bits, counted, rows, values};
use crate::watch::Watch;
use crate::{Z, falling, repeated};

/// Trains on so many threads.
fn on_threads<B, O, S>(
    ranks: usize,
    learner: Learner<Components<B, O, S>>,
    setup: Setup,
) -> Outcome<B>
where
    B: AutodiffBackend,
    O: Optimizer<Model<B>, B> + 'static,
    S: LrScheduler + 'static,
{
    let strategy = Some(ZeroStrategy::threads(ranks).into());
    let watch = Watch::default();
    train_shown(learner, setup, strategy, watch.clone(), watch.renderer())
}

fn assert_same_records<B: AutodiffBackend>(ours: &Outcome<B>, burns: &Outcome<B>, epochs: usize) {
    assert_eq!(bits(&ours.model), bits(&burns.model));
    for epoch in 1..=epochs {
        let expected = burns.directory.records(epoch);
        assert_eq!(ours.directory.records(epoch), expected);
    }
}

/// A backward pass in f16.
type Half = Autocast<Z, F16>;

/// The gradients of rows of weight 1 fit into f16 at this scale.
const SCALE: f32 = 1024.0;

/// Of a row whose loss is finite, and whose gradient leaves f16 at this scale and at those that
/// follow.
const HEAVY: f32 = 3e6;

fn scaler() -> GradScaler {
    let config = GradScalerConfig {
        init_scale: SCALE,
        ..GradScalerConfig::default()
    };
    GradScaler::new(config).unwrap()
}

/// What one rank alone would skip, all skip where only one of them overflows: the others' gradients
/// of that step are lost with it.
#[test]
fn one_rank_overflows_and_all_skip() {
    let _turn = crate::turn();
    let start = Model::<Half>::new();
    let finite = rows(0, 6 * MICRO_BATCH);
    let mut heavy = finite.clone();
    heavy[2 * MICRO_BATCH + 1].weight = HEAVY;

    let alone = scaler();
    let adam = alone.wrap(AdamWConfig::new().init());
    let setup = Setup::new(heavy.clone(), 2);
    let burns = train(start.clone(), adam, falling(), setup, None);
    // Once an epoch.
    assert_eq!((alone.skipped_steps(), alone.steps()), (2, 12));

    for stage in crate::STAGES {
        for overflows in 0..2 {
            let zero =
                ZeroOptimizer::in_learner(AdamWConfig::new().init(), ZeroSettings::stage(stage));
            let scaler = scaler();
            let learner = Learner::new(start.clone(), scaler.wrap(zero), falling());
            let mut parts = [finite.clone(), finite.clone()];
            parts[overflows].clone_from(&heavy);
            let ours = on_threads(2, learner, Setup::new(parts.concat(), 2));

            // The model is that of ranks that skipped together; the handle is rank 0's.
            assert_same_records(&ours, &burns, 2);
            assert_eq!((scaler.skipped_steps(), scaler.steps()), (2, 12), "{stage}");
            assert_eq!(scaler.scale(), alone.scale(), "{stage}");
        }
    }
}

/// Muon meets matrices, each whole on one rank, and its records are those of the whole model.
#[test]
fn muon_is_burns_where_parameters_are_whole() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    let data = rows(0, 22);
    let burns_muon = |setup| {
        let muon = MuonConfig::new().init();
        train(start.clone(), muon, falling(), setup, None)
    };
    let burns = burns_muon(Setup::new(data.clone(), 3));
    for stage in crate::STAGES {
        let sharding = ZeroSettings {
            partition: Partition::Whole,
            bucket_elements: 20,
            ..ZeroSettings::stage(stage)
        };
        let learner = || {
            let muon = ZeroOptimizer::in_learner(MuonConfig::new().init(), sharding.clone());
            Learner::new(start.clone(), muon, falling())
        };
        let ours = on_threads(2, learner(), Setup::new(repeated(&data, 2), 3));
        assert_same_records(&ours, &burns, 3);

        // Each goes on with the other's record.
        let resumed = |data, from: &Outcome<Z>| {
            let mut setup = Setup::new(data, 3);
            setup.resume = Some((2, from.directory.path().to_owned()));
            setup
        };
        let setup = resumed(repeated(&data, 2), &burns);
        let ours_of_burns = on_threads(2, learner(), setup);
        let burns_of_ours = burns_muon(resumed(data.clone(), &ours));
        for resumed in [ours_of_burns, burns_of_ours] {
            assert_eq!(bits(&resumed.model), bits(&burns.model), "{stage}");
            assert_eq!(resumed.directory.records(3), burns.directory.records(3));
        }
    }
}

/// Micro-batches of a window.
const WINDOW: usize = 2;
const RATE: f64 = 0.05;

/// Four micro-batches a rank, of which ever more rows are padding: no two ranks count alike, nor
/// two windows.
fn padded(ranks: usize) -> Vec<Row> {
    let mut data = rows(0, ranks * 4 * MICRO_BATCH);
    for (micro_batch, rows) in data.chunks_mut(MICRO_BATCH).enumerate() {
        let padding = (micro_batch / 3 + micro_batch % 2) % MICRO_BATCH;
        rows[..padding].iter_mut().for_each(|row| row.weight = 0.0);
    }
    data
}

/// Windows of all ranks' micro-batches, each as one batch. A row's loss counts as `weigh` says, of
/// the rows of its rank and those of all.
fn in_windows(
    start: &Model<Z>,
    data: &[Row],
    ranks: usize,
    weigh: impl Fn(usize, usize) -> f32,
) -> Model<Z> {
    let parts: Vec<_> = data.chunks(data.len() / ranks).collect();
    let (mut model, mut optimizer) = (start.clone(), AdamWConfig::new().init::<Z, Model<Z>>());
    for window in 0..4 / WINDOW {
        let of_window = |part: &[Row]| -> Vec<Row> {
            let rows = part.chunks(WINDOW * MICRO_BATCH).nth(window);
            rows.unwrap().to_vec()
        };
        let mut windows: Vec<Vec<Row>> = parts.iter().map(|part| of_window(part)).collect();
        let all = windows.iter().map(|rows| counted(rows)).sum();
        for rows in &mut windows {
            let factor = weigh(counted(rows), all);
            rows.iter_mut().for_each(|row| row.weight *= factor);
        }
        let loss = model.loss_sum(&windows.concat());
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    model
}

#[test]
fn items_are_those_of_all_ranks() {
    let _turn = crate::turn();
    let start = Model::<Z>::new();
    for ranks in 1..=3 {
        let data = padded(ranks);
        let expected = in_windows(&start, &data, ranks, |_, all| 1.0 / all as f32);
        if ranks > 1 {
            // What it would be if each rank counted alone.
            let own = |own, _| 1.0 / (ranks * own) as f32;
            let wrong = in_windows(&start, &data, ranks, own);
            let (right, wrong) = (values(&expected).concat(), values(&wrong).concat());
            let apart = right.iter().zip(wrong).map(|(a, b)| (a - b).abs());
            assert!(apart.fold(0.0, f32::max) > 1e-3, "{ranks} ranks");
        }
        for stage in crate::STAGES {
            for reduction in [ReduceOp::Mean, ReduceOp::Sum] {
                let seen = Arc::new(Mutex::new(Vec::<(ThreadId, f64, f64)>::new()));
                let sharding = ZeroSettings {
                    reduction,
                    bucket_elements: 20,
                    ..ZeroSettings::stage(stage)
                };
                let zero = ZeroOptimizer::in_learner(AdamWConfig::new().init(), sharding);
                let (items, of_ranks) = (zero.items_of_all_ranks(), seen.clone());
                let steps = MultiSteps::new(zero, AccumConfig::tokens(WINDOW)).unwrap();
                let steps = steps.with_items_of_all_ranks(move |own| {
                    let all = items(own);
                    let mut seen = of_ranks.lock().unwrap();
                    seen.push((thread::current().id(), own, all));
                    all
                });
                let model = start.clone().counting();
                let learner = Learner::new(model, steps, ConstantLr::new(RATE));
                let ours = on_threads(ranks, learner, Setup::new(data.clone(), 1));
                assert_close(&ours.model, &expected, 2e-4);
                assert_counted(&seen.lock().unwrap(), &data, ranks, reduction);
            }
        }
    }
}

/// Each rank was told, in each of its micro-batches, what all ranks count in it.
fn assert_counted(seen: &[(ThreadId, f64, f64)], data: &[Row], ranks: usize, reduction: ReduceOp) {
    let parts = data.chunks(data.len() / ranks);
    let counts = parts.map(|part| part.chunks(MICRO_BATCH).map(|rows| counted(rows) as f64));
    let mut counts: Vec<Vec<f64>> = counts.map(Iterator::collect).collect();
    let divisor = match reduction {
        ReduceOp::Sum => 1.0,
        ReduceOp::Mean => ranks as f64,
    };
    let of_all = |step: usize| counts.iter().map(|rank| rank[step]).sum::<f64>() / divisor;
    let expected: Vec<f64> = (0..4).map(of_all).collect();
    for &(thread, ..) in seen {
        let rank = seen.iter().filter(|(other, ..)| *other == thread);
        let all: Vec<f64> = rank.map(|(.., all)| *all).collect();
        assert_eq!(all, expected, "{ranks} ranks, {reduction}");
    }
    // Each rank told its own.
    let mut own: Vec<f64> = seen.iter().map(|(_, own, _)| *own).collect();
    let mut told = counts.drain(..).flatten().collect::<Vec<_>>();
    own.sort_by(f64::total_cmp);
    told.sort_by(f64::total_cmp);
    assert_eq!(own, told, "{ranks} ranks, {reduction}");
}
