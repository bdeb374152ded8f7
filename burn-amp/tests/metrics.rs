//! What the Learner shows.

mod support;

use burn::{
    data::dataloader::Progress,
    optim::AdamConfig,
    train::metric::{Adaptor, Metric, MetricMetadata, Numeric},
};
use burn_amp::{GradScaler, LossScaleMetric, SkippedStepsMetric};
use support::{B, Net, gradients, net, scaled};

fn metadata() -> MetricMetadata {
    let progress = || Progress {
        items_processed: 1,
        items_total: 1,
    };
    MetricMetadata {
        progress: progress(),
        global_progress: progress(),
        iteration: Some(0),
        lr: None,
    }
}

/// Any output of any model feeds them, as it is.
fn update<M: Metric<Input = ()> + Numeric>(metric: &mut M) -> (f64, String) {
    struct AnyOutput;
    let entry = metric.update(&Adaptor::<M::Input>::adapt(&AnyOutput), &metadata());
    assert_eq!(metric.value().current(), metric.running_value().current());
    (metric.value().current(), entry.formatted)
}

#[test]
fn metrics_follow_the_scaler() {
    let scaler = GradScaler::default();
    let mut scale = LossScaleMetric::new(&scaler);
    let mut skipped = SkippedStepsMetric::new(&scaler);
    assert_eq!(update(&mut scale), (65536.0, "65536".to_owned()));
    assert_eq!(update(&mut skipped), (0.0, "0".to_owned()));

    let mut optimizer = scaled(&scaler, AdamConfig::new().init());
    let mut net: Net<B> = net();
    for overflowing in [&[1][..], &[], &[2]] {
        let gradients = gradients(&net, 0, overflowing);
        net = optimizer.step(0.1, net, gradients).unwrap();
    }
    assert_eq!(update(&mut scale), (16384.0, "16384".to_owned()));
    assert_eq!(update(&mut skipped), (2.0, "2".to_owned()));

    // A new epoch begins: nothing was accumulated.
    scale.clear();
    skipped.clear();
    assert_eq!(update(&mut skipped).0, 2.0);
}

#[test]
fn a_disabled_scaler_shows_one_and_zero() {
    let scaler = GradScaler::disabled();
    assert_eq!(update(&mut LossScaleMetric::new(&scaler)).0, 1.0);
    assert_eq!(update(&mut SkippedStepsMetric::new(&scaler)).0, 0.0);
}
