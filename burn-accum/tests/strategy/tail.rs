//! The last window of an epoch has its true weights.

use burn::{
    lr_scheduler::{constant::ConstantLr, linear::LinearLrSchedulerConfig},
    module::AutodiffModule,
    optim::{
        AdamWConfig, GradientsParams, MuonConfig, Optimizer, SgdConfig, momentum::MomentumConfig,
    },
};
use burn_accum::{AccumConfig, EpochTail, UpdateCounter};
use burn_flex::Flex;

use crate::{
    learner::{B, MICRO_BATCH, Outcome, Setup, train},
    model::{Model, Row, assert_close, bits, counted, rows},
    windows::{Windows, in_windows, recorded},
};

/// Micro-batches a window.
const WINDOW: usize = 4;

const RATE: f64 = 0.05;

const EPOCHS: usize = 3;

fn sgd() -> impl Optimizer<Model<B>, B> + 'static {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

/// Trains with windows, at a constant rate.
fn windows(
    start: &Model<B>,
    inner: impl Optimizer<Model<B>, B> + 'static,
    config: AccumConfig,
    setup: Setup,
    tail: EpochTail,
) -> (Outcome<B>, UpdateCounter) {
    let Windows { update, counter } = in_windows(inner, config);
    let strategy = update.strategy().with_tail(tail);
    let scheduler = ConstantLr::new(RATE);
    let strategy = Some(strategy.into());
    (
        train(start.clone(), update, scheduler, setup, strategy),
        counter,
    )
}

/// One update a batch: the mean over the counted rows of each.
fn batches<'a>(
    mut model: Model<B>,
    mut optimizer: impl Optimizer<Model<B>, B>,
    batches: impl IntoIterator<Item = &'a [Row]>,
) -> Model<Flex> {
    for rows in batches {
        let loss = model.loss_sum(rows) / counted(rows) as f32;
        let gradients = GradientsParams::from_grads(loss.backward(), &model);
        model = optimizer.step(RATE, model, gradients);
    }
    model.valid()
}

fn ten_micro_batches_are_three_updates(
    inner: impl Optimizer<Model<B>, B> + 'static,
    tolerance: f32,
) {
    let start = Model::new();
    let data = rows(0, 10 * MICRO_BATCH);
    let setup = Setup::new(data.clone(), EPOCHS);
    let config = AccumConfig::mean(WINDOW);
    let (ours, counter) = windows(&start, inner.clone(), config, setup, EpochTail::Apply);
    assert_eq!(counter.updates(), 3 * EPOCHS as u64);
    assert_eq!(counter.micro_step(), 0);

    let epochs = (0..EPOCHS).flat_map(|_| data.chunks(WINDOW * MICRO_BATCH));
    let expected = batches(start, inner, epochs);
    assert_close(&ours.model, &expected, tolerance);
}

#[test]
fn for_sgd_with_momentum() {
    let _turn = crate::turn();
    ten_micro_batches_are_three_updates(sgd(), 2e-5);
}

#[test]
fn for_adamw() {
    let _turn = crate::turn();
    ten_micro_batches_are_three_updates(AdamWConfig::new().init(), 2e-5);
}

/// Muon multiplies small singular values of the gradient, and what is rounded off in them, with up
/// to 3.4445 in each of its five steps.
#[test]
fn for_muon() {
    let _turn = crate::turn();
    ten_micro_batches_are_three_updates(MuonConfig::new().init(), 1e-4);
}

/// Under `Tokens` micro-batches may hold different numbers of counted rows, and none at all.
#[test]
fn counted_items_are_weighted_wherever_they_are() {
    let _turn = crate::turn();
    let start = Model::new().counting();
    // The last micro-batch has two rows, and one holds nothing but padding.
    let data: Vec<_> = rows(0, 9 * MICRO_BATCH + 2)
        .into_iter()
        .map(|row| Row {
            weight: match row.index {
                4..8 => 0.0,
                index if index % 3 == 1 => 0.0,
                _ => 1.0,
            },
            ..row
        })
        .collect();
    let setup = Setup::new(data.clone(), EPOCHS);
    let config = AccumConfig::tokens(WINDOW);
    let (ours, counter) = windows(&start, sgd(), config, setup, EpochTail::Apply);
    assert_eq!(counter.updates(), 3 * EPOCHS as u64);

    let epochs = (0..EPOCHS).flat_map(|_| data.chunks(WINDOW * MICRO_BATCH));
    assert_close(&ours.model, &batches(start, sgd(), epochs), 2e-5);
}

/// A micro-batch that is not finite is dropped with its weight, in a window and in a tail; a tail
/// of nothing else is no update, and the schedule does not advance by it.
#[test]
fn what_is_dropped_has_no_weight() {
    let _turn = crate::turn();
    for (bad, updates) in [(&[5][..], 3), (&[37], 3), (&[33, 37], 2)] {
        let start = Model::new();
        let mut data = rows(0, 10 * MICRO_BATCH);
        for index in bad {
            data[*index].weight = f32::INFINITY;
        }
        let Windows { update, counter } = in_windows(sgd(), AccumConfig::mean(WINDOW));
        let scheduler = update.per_update(ConstantLr::new(RATE));
        let strategy = update.strategy();
        let setup = Setup::new(data.clone(), 1);
        let ours = train(
            start.clone(),
            update,
            scheduler,
            setup,
            Some(strategy.into()),
        );
        assert_eq!(counter.updates(), updates, "{bad:?}");
        assert_eq!(counter.dropped(), bad.len() as u64);

        let finite: Vec<_> = data
            .chunks(WINDOW * MICRO_BATCH)
            .map(|window| {
                let finite = window
                    .chunks(MICRO_BATCH)
                    .filter(|rows| rows.iter().all(|row| row.weight.is_finite()));
                finite.flatten().copied().collect::<Vec<_>>()
            })
            .filter(|window| !window.is_empty())
            .collect();
        let expected = batches(start, sgd(), finite.iter().map(Vec::as_slice));
        assert_close(&ours.model, &expected, 2e-5);
    }
}

#[test]
fn the_schedule_advances_once_an_update_also_by_the_last_of_an_epoch() {
    let _turn = crate::turn();
    for (tail, expected) in [
        // In tenths. The update that ends an epoch is followed at the beginning of the next.
        (
            EpochTail::Apply,
            [
                10, 10, 10, 10, 9, 9, 9, 9, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6, 5, 5,
            ],
        ),
        (
            EpochTail::Carry,
            [
                10, 10, 10, 10, 9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, 6, 6, 6, 6,
            ],
        ),
    ] {
        let update = in_windows(sgd(), AccumConfig::mean(WINDOW)).update;
        let falling = LinearLrSchedulerConfig::new(1.0, 0.0, 10).init().unwrap();
        let scheduler = update.per_update(falling);
        let strategy = update.strategy().with_tail(tail);
        let setup = Setup::new(rows(0, 10 * MICRO_BATCH), 2);
        let strategy = Some(strategy.into());
        let outcome = train(Model::new(), update, scheduler, setup, strategy);

        let rates = outcome.watch.learning_rates();
        let tenths: Vec<_> = rates
            .iter()
            .map(|rate| (rate * 10.0).round() as i32)
            .collect();
        assert_eq!(tenths, expected);
    }
}

/// Validation and record come after the epoch's last update.
#[test]
fn the_epoch_is_complete_when_it_is_validated_and_recorded() {
    let _turn = crate::turn();
    let start = Model::new();
    let setup = Setup::new(rows(0, 10 * MICRO_BATCH), 1);
    let config = AccumConfig::mean(WINDOW);
    let (applied, _) = windows(&start, sgd(), config, setup, EpochTail::Apply);
    let (_, _, record) = applied.directory.records(1);
    assert_eq!(recorded(&applied.directory, 1, "updates"), 3, "{record:#}");
    assert_eq!(recorded(&applied.directory, 1, "window micro-steps"), 0);
    let window = &record["item"]["parts"]["accumulate"]["values"];
    let mut names = window.as_object().unwrap().keys();
    assert!(!names.any(|name| name.starts_with("sum ")), "{window:#}");

    // Validated again, by a training that only does that.
    let mut setup = Setup::new(Vec::new(), 2);
    setup.resume = Some((1, applied.directory.path().to_owned()));
    let (again, counter) = windows(&start, sgd(), config, setup, EpochTail::Apply);
    assert_eq!(counter.updates(), 3);
    assert_eq!(bits(&again.model), bits(&applied.model));
    let losses = |outcome: &Outcome<B>| {
        let lines = outcome.watch.logged("valid ").into_iter();
        let losses = lines.filter_map(|line| Some(line.split_once("Loss")?.1.to_owned()));
        losses.collect::<Vec<_>>()
    };
    assert_eq!(losses(&again), losses(&applied));
    assert_eq!(losses(&applied).len(), 2);
}

/// Windows that are carried over are those of one long epoch; the model that is returned has seen
/// what is left.
#[test]
fn a_window_may_go_on_in_the_next_epoch() {
    let _turn = crate::turn();
    let start = Model::new();
    let data = rows(0, 10 * MICRO_BATCH);
    let setup = Setup::new(data.clone(), 3);
    let config = AccumConfig::mean(WINDOW);
    let (ours, counter) = windows(&start, sgd(), config, setup, EpochTail::Carry);
    assert_eq!(counter.updates(), 8);

    let stream = data.repeat(3);
    let expected = batches(start, sgd(), stream.chunks(WINDOW * MICRO_BATCH));
    assert_close(&ours.model, &expected, 2e-5);

    for (epoch, updates, micro_steps) in [(1, 2, 2), (2, 5, 0), (3, 7, 2)] {
        let counter = |name| recorded(&ours.directory, epoch, name);
        assert_eq!(counter("updates"), updates);
        assert_eq!(counter("window micro-steps"), micro_steps);
    }
}
