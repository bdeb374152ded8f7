//! Learning rates that follow updates.

use burn::{
    lr_scheduler::{
        LrScheduler,
        linear::{LinearLrScheduler, LinearLrSchedulerConfig},
    },
    optim::SgdConfig,
};
use burn_accum::{AccumConfig, LrScaling, PerUpdate, UpdateCounter};
use burn_flex::Flex;

use crate::support::{B, Net, Windows, gradients, net};

fn falling() -> LinearLrScheduler {
    LinearLrSchedulerConfig::new(1.0, 0.0, 10).init().unwrap()
}

/// In tenths.
fn tenths(lr: f64) -> u32 {
    (lr * 10.0).round() as u32
}

#[test]
fn the_rate_stands_still_within_windows_and_skipped_ones() {
    let sgd = SgdConfig::new().init::<B, Net<B>>();
    let mut optimizer = Windows::new(sgd, AccumConfig::mean(2));
    let mut scheduler = PerUpdate::new(falling(), &optimizer.updates());
    let mut net = net();
    let mut rates = Vec::new();
    // The second window is one of non-finite micro-batches only.
    for step in 0..10 {
        let lr = scheduler.step();
        rates.push(tenths(lr));
        let bad: &[usize] = if step / 2 == 1 { &[0] } else { &[] };
        net = optimizer.step(lr, net.clone(), gradients(&net, step, bad, &[]));
    }
    assert_eq!(rates, [10, 10, 9, 9, 9, 9, 8, 8, 7, 7]);
}

/// Stopped anywhere, and loaded before or after the optimizer, whose counter jumps then.
#[test]
fn a_schedule_resumes_everywhere() {
    let sgd = || SgdConfig::new().init::<B, Net<B>>();
    for (stop, scheduler_first) in (0..8).flat_map(|stop| [(stop, true), (stop, false)]) {
        let mut optimizer = Windows::new(sgd(), AccumConfig::mean(3));
        let mut scheduler = PerUpdate::new(falling(), &optimizer.updates());
        let mut net = net();
        for step in 0..stop {
            let lr = scheduler.step();
            net = optimizer.step(lr, net.clone(), gradients(&net, step, &[], &[]));
        }
        let saved = scheduler.to_record::<Flex>();
        let saved_optimizer = optimizer.update.record();

        let fresh = Windows::new(sgd(), AccumConfig::mean(3));
        let mut resumed = PerUpdate::new(falling(), &fresh.updates());
        if scheduler_first {
            resumed = resumed.load_record::<Flex>(saved.clone());
        }
        let mut fresh = fresh.load(saved_optimizer);
        if !scheduler_first {
            resumed = resumed.load_record::<Flex>(saved.clone());
        }
        assert_eq!(resumed.to_record::<Flex>(), saved);
        let mut other = net.clone();
        for step in stop..stop + 8 {
            let (lr, resumed) = (scheduler.step(), resumed.step());
            assert_eq!(lr, resumed, "stopped after {stop}");
            net = optimizer.step(lr, net.clone(), gradients(&net, step, &[], &[]));
            other = fresh.step(resumed, other.clone(), gradients(&other, step, &[], &[]));
        }
    }
}

#[test]
fn any_count_of_updates_can_be_followed() {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    };
    let updates = Arc::new(AtomicU64::new(40));
    let source = updates.clone();
    let mut scheduler = PerUpdate::from_fn(falling(), move || source.load(Ordering::Relaxed));
    let mut step_at = |count| {
        updates.store(count, Ordering::Relaxed);
        tenths(scheduler.step())
    };
    assert_eq!(
        [40, 40, 41, 43, 42, 43, 44].map(&mut step_at),
        [10, 10, 9, 7, 7, 7, 6]
    );
}

#[test]
fn a_larger_batch_warms_up_to_its_rate() {
    let constant = || burn::lr_scheduler::constant::ConstantLr::from(0.1);
    let mut square = LrScaling::SquareRoot.scale(constant(), 32, 128, 4).unwrap();
    let rates: Vec<_> = (0..6).map(|_| (square.step() * 1000.0).round()).collect();
    assert_eq!(rates, [100.0, 125.0, 150.0, 175.0, 200.0, 200.0]);

    let saved = square.to_record::<Flex>();
    let fresh = LrScaling::SquareRoot.scale(constant(), 32, 128, 8).unwrap();
    let mut resumed = fresh.load_record::<Flex>(saved);
    assert_eq!((resumed.step() * 1000.0).round(), 175.0, "step 6 of 8");

    let mut cold = LrScaling::Linear.scale(constant(), 100, 50, 0).unwrap();
    assert_eq!(cold.step(), 0.05);
    let error = LrScaling::Linear.scale(constant(), 0, 50, 0).unwrap_err();
    assert_eq!(
        error.to_string(),
        "base_batch = 0, but it must be at least 1"
    );
    let _ = PerUpdate::new(cold, &UpdateCounter::default());
}
