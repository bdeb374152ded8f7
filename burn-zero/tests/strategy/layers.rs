//! Parts of an update around its reduction: each rank has its own, and they decide alike.

use burn::lr_scheduler::{LrScheduler, constant::ConstantLr};
use burn::optim::{AdamWConfig, GradientsParams, MuonConfig, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::AccumConfig;
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_update::Update;
use burn_zero::{Partition, ReduceOp, ReduceOverRanks, ZeroSettings};

use crate::learner::{MICRO_BATCH, Outcome, Setup, train};
use crate::model::{Model, Row, assert_close, bits, counted, rows, values};
use crate::{Z, falling, repeated};

/// Trains on so many threads.
fn on_threads<B, S>(
    ranks: usize,
    model: Model<B>,
    update: Update<Model<B>, B>,
    schedule: S,
    setup: Setup,
) -> Outcome<B>
where
    B: AutodiffBackend,
    S: LrScheduler + 'static,
{
    let strategy = Some(update.strategy().threads(ranks).into());
    train(model, update, schedule, setup, strategy)
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
    let update = Update::new(AdamWConfig::new().init()).scale(alone.clone());
    let setup = Setup::new(heavy.clone(), 2);
    let without_ranks = on_threads(1, start.clone(), update.unwrap(), falling(), setup);
    // Once an epoch.
    assert_eq!((alone.skipped_steps(), alone.steps()), (2, 12));

    for stage in crate::STAGES {
        for overflows in 0..2 {
            let scaler = scaler();
            let update = Update::new(AdamWConfig::new().init())
                .reduce_in_learner(ZeroSettings::stage(stage))
                .and_then(|update| update.scale(scaler.clone()));
            let mut parts = [finite.clone(), finite.clone()];
            parts[overflows].clone_from(&heavy);
            let setup = Setup::new(parts.concat(), 2);
            let ours = on_threads(2, start.clone(), update.unwrap(), falling(), setup);

            // The model is that of ranks that skipped together; the handle is rank 0's.
            assert_same_records(&ours, &without_ranks, 2);
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
    let without_ranks = |setup| {
        let muon = Update::new(MuonConfig::new().init());
        on_threads(1, start.clone(), muon, falling(), setup)
    };
    let expected = without_ranks(Setup::new(data.clone(), 3));
    let burns = MuonConfig::new().init();
    let setup = Setup::new(data.clone(), 3);
    let burns = train(start.clone(), burns, falling(), setup, None);
    assert_eq!(bits(&expected.model), bits(&burns.model));
    for stage in crate::STAGES {
        let sharding = ZeroSettings {
            partition: Partition::Whole,
            bucket_elements: 20,
            ..ZeroSettings::stage(stage)
        };
        let on_two_ranks = |setup| {
            let muon = Update::new(MuonConfig::new().init());
            let muon = muon.reduce_in_learner(sharding.clone()).unwrap();
            on_threads(2, start.clone(), muon, falling(), setup)
        };
        let ours = on_two_ranks(Setup::new(repeated(&data, 2), 3));
        assert_same_records(&ours, &expected, 3);

        // Each goes on with the other's record.
        let resumed = |data, from: &Outcome<Z>| {
            let mut setup = Setup::new(data, 3);
            setup.resume = Some((2, from.directory.path().to_owned()));
            setup
        };
        let ours_of_theirs = on_two_ranks(resumed(repeated(&data, 2), &expected));
        let theirs_of_ours = without_ranks(resumed(data.clone(), &ours));
        for resumed in [ours_of_theirs, theirs_of_ours] {
            assert_eq!(bits(&resumed.model), bits(&expected.model), "{stage}");
            assert_eq!(resumed.directory.records(3), expected.directory.records(3));
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
                let sharding = ZeroSettings {
                    reduction,
                    bucket_elements: 20,
                    ..ZeroSettings::stage(stage)
                };
                let update = Update::new(AdamWConfig::new().init())
                    .reduce_in_learner(sharding)
                    .and_then(|update| update.accumulate(AccumConfig::tokens(WINDOW)));
                let (model, schedule) = (start.clone().counting(), ConstantLr::new(RATE));
                let setup = Setup::new(data.clone(), 1);
                let ours = on_threads(ranks, model, update.unwrap(), schedule, setup);
                assert_close(&ours.model, &expected, 2e-4);
            }
        }
    }
}
