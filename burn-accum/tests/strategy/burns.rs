//! With windows of one micro-batch it is Burn's own training, bit for bit.

use burn::{
    lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig},
    optim::{AdamWConfig, Optimizer, SgdConfig, momentum::MomentumConfig},
    train::{ExecutionStrategy, TrainingStrategy},
};
use burn_accum::{AccumConfig, EpochTail};
use burn_flex::FlexDevice;

use crate::{
    equal::{EPOCHS, assert_same, seeded, setup},
    learner::{B, Outcome, Setup, Stop, train},
    model::{Model, SLOW_ROW, bits, rows},
    windows::in_windows,
};

fn sgd() -> impl Optimizer<Model<B>, B> + 'static {
    let momentum = MomentumConfig::new().with_momentum(0.9);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn adamw() -> impl Optimizer<Model<B>, B> + 'static {
    AdamWConfig::new().init()
}

fn falling() -> impl LrScheduler + 'static {
    LinearLrSchedulerConfig::new(0.1, 0.01, 40).init().unwrap()
}

/// Trains with windows of one, in Burn's way and in ours.
fn both(
    inner: impl Optimizer<Model<B>, B> + 'static,
    setup: impl Fn() -> Setup,
    tail: EpochTail,
) -> [Outcome<B>; 2] {
    [false, true].map(|is_ours| {
        let update = in_windows(inner.clone(), AccumConfig::mean(1)).update;
        let scheduler = update.per_update(falling());
        let strategy = is_ours.then(|| update.strategy().with_tail(tail).into());
        train(seeded(), update, scheduler, setup(), strategy)
    })
}

#[test]
fn windows_of_one_are_burns_own_training() {
    let _turn = crate::turn();
    for tail in [EpochTail::Apply, EpochTail::Carry] {
        let [burns, ours] = both(sgd(), setup, tail);
        assert_same(&ours, &burns, EPOCHS);
        let [burns, ours] = both(adamw(), setup, tail);
        assert_same(&ours, &burns, EPOCHS);
    }
}

/// The test above sees what it should.
#[test]
fn a_training_shows_all_that_is_compared() {
    let _turn = crate::turn();
    let [burns, _] = both(sgd(), setup, EpochTail::Apply);
    let watch = &burns.watch;
    // 22 rows are 6 micro-batches, and 6 rows are 2.
    assert_eq!(watch.shown("train: ").len(), EPOCHS * 6);
    assert_eq!(watch.shown("item train: ").len(), EPOCHS * 6);
    assert_eq!(watch.shown("valid: ").len(), EPOCHS * 2);
    assert_eq!(watch.shown("ended, summary of epochs: None").len(), 1);
    assert_eq!(watch.logged("train ").len(), 3 * EPOCHS * 6);
    assert_eq!(watch.logged("valid ").len(), 2 * EPOCHS * 2);
    assert_eq!(watch.logged("end ").len(), 2 * EPOCHS);
    assert_eq!(burns.watch.learning_rates().len(), EPOCHS * 6);
    assert_ne!(bits(&burns.model), bits(&seeded()));
}

#[test]
fn and_the_training_without_accumulation() {
    let _turn = crate::turn();
    let burns = train(seeded(), adamw(), falling(), setup(), None);
    let device = TrainingStrategy::Default(ExecutionStrategy::SingleDevice(FlexDevice));
    let on_device = train(seeded(), adamw(), falling(), setup(), Some(device));

    let update = in_windows(adamw(), AccumConfig::mean(1)).update;
    let strategy = update.strategy().with_devices(vec![FlexDevice]);
    let strategy = Some(strategy.into());
    let ours = train(seeded(), update, falling(), setup(), strategy);
    for burns in [burns, on_device] {
        assert_eq!(ours.watch.lines(), burns.watch.lines());
        assert_eq!(bits(&ours.model), bits(&burns.model));
    }
}

#[test]
fn it_stops_early_at_the_same_epoch() {
    let _turn = crate::turn();
    let early = || {
        let mut setup = setup();
        setup.stop = Some(Stop::After(2));
        setup
    };
    let [burns, ours] = both(sgd(), early, EpochTail::Apply);
    assert_same(&ours, &burns, 2);
}

/// Burn's own loop may ask before the metrics of the last items are there, and then stop at another
/// epoch.
#[test]
fn early_stopping_sees_the_whole_epoch() {
    let _turn = crate::turn();
    for seed in 0..10 {
        let update = in_windows(sgd(), AccumConfig::mean(2)).update;
        let strategy = update.strategy();
        let mut setup = setup();
        setup.epochs = 40;
        setup.valid = rows(SLOW_ROW - 5, SLOW_ROW + 1);
        setup.shuffle = Some(seed);
        setup.stop = Some(Stop::NoImprovementSince(2));
        let ours = train(seeded(), update, falling(), setup, Some(strategy.into()));
        let losses = validation_losses(&ours);
        assert!((3..40).contains(&losses.len()), "{losses:?}");
        // All but the last two are followed by a better one within two epochs.
        let best = |losses: &[f64]| losses.iter().copied().fold(f64::INFINITY, f64::min);
        for (index, window) in losses.windows(3).enumerate() {
            let is_last = index + 3 == losses.len();
            let improved = best(&window[1..]) < best(&losses[..=index]);
            assert_eq!(improved, !is_last, "seed {seed}, {index}: {losses:?}");
        }
    }
}

/// The mean of each epoch: of the running means, the last.
fn validation_losses(outcome: &Outcome<B>) -> Vec<f64> {
    let mut losses = Vec::new();
    for line in outcome.watch.logged("valid ") {
        if let Some((epoch, _)) = line.split_once(" MetricId { id: \"Loss\" }") {
            let epoch: usize = epoch.parse().unwrap();
            let (_, value) = line.rsplit_once("aggregated_value: ").unwrap();
            let (value, _) = value.split_once(',').unwrap();
            losses.resize(epoch, f64::NAN);
            losses[epoch - 1] = value.parse().unwrap();
        }
    }
    losses
}

#[test]
fn it_is_interrupted_in_the_same_way() {
    let _turn = crate::turn();
    // In the second epoch of training, and in the first validation, after which Burn begins another
    // epoch.
    for (at, recorded) in [(9, 0), (1001, 1)] {
        let interrupted = || {
            let mut setup = setup();
            setup.interrupt_at = Some(at);
            setup
        };
        let [burns, ours] = both(adamw(), interrupted, EpochTail::Apply);
        assert_same(&ours, &burns, recorded);
        let shown = burns.watch.shown("train: ").len();
        assert!(shown < 2 * 6, "{shown}");
        for outcome in [burns, ours] {
            let message = outcome.interrupter.get_message();
            assert_eq!(message.as_deref(), Some("there it is"));
        }
    }
}
