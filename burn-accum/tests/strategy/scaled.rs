//! Under a loss scaler, with a backward pass that really is in f16.

use burn::{
    backend::Autodiff,
    lr_scheduler::{constant::ConstantLr, linear::LinearLrSchedulerConfig},
    module::AutodiffModule,
    optim::{GradientsParams, Optimizer, SgdConfig},
    tensor::backend::Backend,
};
use burn_accum::{AccumConfig, ClipByNorm, UpdateCounter};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::Flex;

use crate::{
    learner::{MICRO_BATCH, Outcome, Setup, train},
    model::{Model, Row, rows, values},
    windows::{Windows, in_windows},
};

type Half = Autocast<Autodiff<Flex>, F16>;

/// Micro-batches a window.
const WINDOW: usize = 4;

const MICRO_BATCHES: usize = 10;
const RATE: f64 = 0.05;

/// The gradients of rows of weight 1 fit into f16 at this scale.
const SCALE: f32 = 1024.0;

/// Of a row whose loss is finite, and whose gradient leaves f16 at this scale and at those that
/// follow.
const HEAVY: f32 = 3e6;

/// The rows of an epoch; the micro-batches `overflowing` hold a heavy one.
fn data(overflowing: &[usize]) -> Vec<Row> {
    let mut data = rows(0, MICRO_BATCHES * MICRO_BATCH);
    for micro_batch in overflowing {
        data[micro_batch * MICRO_BATCH + 1].weight = HEAVY;
    }
    data
}

struct Trained {
    outcome: Outcome<Half>,
    scaler: GradScaler,
    updates: UpdateCounter,
}

fn train_half(start: &Model<Half>, rows: Vec<Row>) -> Trained {
    let config = GradScalerConfig {
        init_scale: SCALE,
        ..Default::default()
    };
    let scaler = GradScaler::new(config).unwrap();
    let Windows { update, counter } =
        in_windows(SgdConfig::new().init(), AccumConfig::mean(WINDOW));
    let update = update.clip_norm(1e3).unwrap();
    let update = update.scale(scaler.clone()).unwrap();
    let scheduler = update.per_update(ConstantLr::new(RATE));
    let strategy = Some(update.strategy().into());
    let setup = Setup::new(rows, 1);
    Trained {
        outcome: train(start.clone(), update, scheduler, setup, strategy),
        scaler,
        updates: counter,
    }
}

/// The finite micro-batches in windows of four, each as one batch in f32.
fn union(start: &Model<Half>, overflowing: &[usize]) -> Model<Flex> {
    let data = data(overflowing);
    let finite = data.chunks(MICRO_BATCH);
    let finite = finite.filter(|rows| rows.iter().all(|row| row.weight == 1.0));
    let finite: Vec<_> = finite.flatten().copied().collect();

    let mut model = start.on::<Autodiff<Flex>>();
    let mut optimizer = SgdConfig::new().init();
    for rows in finite.chunks(WINDOW * MICRO_BATCH) {
        let loss = model.loss_sum(rows) / rows.len() as f32;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    model.valid()
}

/// Between two models, in the element that differs most.
fn distance<A: Backend, B: Backend>(from: &Model<A>, to: &Model<B>) -> f32 {
    let pairs = values(from).concat().into_iter().zip(values(to).concat());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Wherever micro-batches overflow, in a window, at its end, in the tail: they are dropped, the
/// scale falls at once, the window is completed with the next finite ones, and the epoch's last
/// with what there is.
#[test]
fn overflowed_micro_batches_are_dropped_and_the_rest_is_their_union() {
    let _turn = crate::turn();
    for overflowing in [
        &[][..],
        &[0],
        &[2, 3],
        &[3],
        &[1, 8],
        &[9],
        &[4, 9],
        &[8, 9],
    ] {
        let start = Model::<Half>::new();
        let trained = train_half(&start, data(overflowing));
        let case = format!("overflow in {overflowing:?}");

        let dropped = overflowing.len() as u64;
        let Trained {
            outcome,
            scaler,
            updates,
        } = trained;
        assert_eq!(scaler.skipped_steps(), dropped, "{case}");
        assert_eq!(
            scaler.scale(),
            SCALE / 2.0_f32.powi(dropped as i32),
            "{case}"
        );
        // The request that ends the epoch is no step of the scaler.
        assert_eq!(scaler.steps(), MICRO_BATCHES as u64, "{case}");
        let finite = MICRO_BATCHES as u64 - dropped;
        assert_eq!(updates.micro_batches(), finite, "{case}");
        assert_eq!(updates.updates(), finite.div_ceil(WINDOW as u64), "{case}");
        assert_eq!(updates.micro_step(), 0, "{case}");

        let expected = union(&start, overflowing);
        let moved = distance(&start, &expected);
        assert!(moved > 1e-3, "it learns: {moved}");
        // f16 rounds by up to 5e-4, and these gradients are sums of few terms.
        let apart = distance(&outcome.model, &expected);
        assert!(apart < 2e-3 * moved, "{case}: {apart} of {moved}");
    }
}

/// The scheduler that follows the windows stands still where the scaler skips.
#[test]
fn the_schedule_follows_updates() {
    let _turn = crate::turn();
    let scaler = GradScaler::new(GradScalerConfig {
        init_scale: SCALE,
        ..Default::default()
    });
    let scaler = scaler.unwrap();
    let Windows { update, counter } =
        in_windows(SgdConfig::new().init(), AccumConfig::mean(WINDOW));
    let update = update.scale(scaler.clone()).unwrap();
    let falling = LinearLrSchedulerConfig::new(0.1, 0.0, 10).init().unwrap();
    let scheduler = update.per_update(falling);
    let strategy = update.strategy();
    let outcome = train(
        Model::<Half>::new(),
        update,
        scheduler,
        Setup::new(data(&[1, 2]), 1),
        Some(strategy.into()),
    );
    assert_eq!((scaler.skipped_steps(), counter.updates()), (2, 2));
    let rates = outcome.watch.learning_rates();
    let thousandths: Vec<_> = rates.iter().map(|rate| (rate * 1e3).round()).collect();
    assert_eq!(
        thousandths,
        [
            100.0, 100.0, 100.0, 100.0, 100.0, 100.0, 90.0, 90.0, 90.0, 90.0
        ]
    );
}
