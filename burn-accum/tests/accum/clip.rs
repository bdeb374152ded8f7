//! Clipping by the global norm.

use burn::{
    module::{Module, Param},
    optim::{GradientsParams, MultiGradientsParams, Optimizer, SgdConfig},
    prelude::DeviceOps,
    tensor::{Tensor, backend::Backend},
};
use burn_accum::{AccumConfig, Accumulation, ClipNorm, Counted, GradNormMetric};
use burn_flex::FlexDevice;
use burn_update::Update;

use crate::support::{
    B, Batch, Clipping, Inner, Net, Windows, assert_close, floats, gradients, net, values,
};

fn sgd() -> impl Optimizer<Net<B>, B> {
    SgdConfig::new().init()
}

fn clipping(max_norm: f32) -> Clipping {
    let clip = ClipNorm::new(max_norm).unwrap();
    let norm = clip.norm();
    let update = Update::new(sgd()).clip(clip).unwrap();
    Clipping { update, norm }
}

/// The gradient that SGD saw with a learning rate of 1, flat.
fn seen(before: &Net<B>, after: &Net<B>) -> Vec<f32> {
    let (before, after) = (floats(before).concat(), floats(after).concat());
    before.iter().zip(&after).map(|(b, a)| b - a).collect()
}

fn norm(values: &[f32]) -> f32 {
    let squares = values.iter().map(|value| f64::from(*value).powi(2));
    squares.sum::<f64>().sqrt() as f32
}

#[test]
fn the_norm_is_over_all_parameters() {
    let start = net();
    let plain = sgd().step(1.0, start.clone(), gradients(&start, 0, &[], &[]));
    let whole = norm(&seen(&start, &plain));

    let mut clipping = clipping(0.5);
    assert_eq!(clipping.norm.last(), None);
    let clipped = clipping.step(1.0, start.clone(), gradients(&start, 0, &[], &[]));
    let last = clipping.norm.last().unwrap();
    assert!((last - whole).abs() < 1e-5 * whole, "{last} is not {whole}");
    let after = norm(&seen(&start, &clipped));
    assert!((after - 0.5).abs() < 1e-5, "{after}");
    // The direction stays.
    for (clipped, plain) in seen(&start, &clipped).iter().zip(seen(&start, &plain)) {
        assert!((clipped - plain * 0.5 / whole).abs() < 1e-6);
    }
}

#[test]
fn within_bounds_no_bit_changes() {
    let start = net();
    let plain = sgd().step(0.1, start.clone(), gradients(&start, 0, &[], &[]));
    // Infinity measures, and clips nothing.
    for max_norm in [1e3, f32::INFINITY] {
        let mut clipping = clipping(max_norm);
        let clipped = clipping.step(0.1, start.clone(), gradients(&start, 0, &[], &[]));
        assert_eq!(values(&plain), values(&clipped));
        let whole = norm(&seen(&start, &plain)) / 0.1;
        let last = clipping.norm.last().unwrap();
        assert!((last - whole).abs() < 1e-4 * whole, "{last} is not {whole}");
    }
}

#[test]
fn non_finite_gradients_are_not_hidden() {
    for step in 0..3 {
        let start = net();
        let mut clipping = clipping(1.0);
        let after = clipping.step(0.1, start.clone(), gradients(&start, step, &[2], &[]));
        assert!(floats(&after)[2].iter().any(|value| !value.is_finite()));
        assert!(!clipping.norm.last().unwrap().is_finite());
    }
}

#[test]
fn devices_are_added_up_first() {
    let start = net();
    let mut multi = MultiGradientsParams::default();
    for step in 0..2 {
        let gradients = gradients(&start, step, &[], &[]);
        multi.grads.push((gradients, FlexDevice.to_id()));
    }
    let mut clipping = clipping(0.5);
    let clipped = clipping.step(1.0, start.clone(), multi);
    assert!((norm(&seen(&start, &clipped)) - 0.5).abs() < 1e-5);
}

#[derive(Module, Debug)]
struct Tied<B: Backend> {
    a: Param<Tensor<B, 1>>,
    b: Param<Tensor<B, 1>>,
}

#[test]
fn a_tied_parameter_is_clipped_once() {
    let device = Default::default();
    let a = Param::<Tensor<B, 1>>::from_data([0.0, 0.0], &device);
    let mut gradients = GradientsParams::new();
    let gradient = Tensor::<Inner, 1>::from_data([6.0, 8.0], &device);
    gradients.register(a.id, gradient);

    let clip = ClipNorm::new(1.0).unwrap();
    let norm = clip.norm();
    let mut update = Update::new(SgdConfig::new().init()).clip(clip).unwrap();
    let tied = Tied { b: a.clone(), a };
    let after = update.step(1.0, tied, gradients).unwrap();
    assert_eq!(norm.last(), Some(10.0));
    let expected = burn::tensor::TensorData::from([-0.6, -0.8]);
    let a = after.a.val().into_data();
    a.assert_approx_eq::<f32>(&expected, Default::default());
}

/// The number of items that comes with gradients is not part of their norm.
#[test]
fn counts_pass() {
    let start = net();
    let clipping = clipping(1e6);
    let windows = Accumulation::new(AccumConfig::tokens(1)).unwrap();
    let mut outside = Windows::of(clipping.update, windows);
    let batch = Batch::rows(0, 1000);
    let gradients = Counted::mean(start.loss(&batch), 1000).backward(&start);
    let net = outside.step(0.1, start.clone(), gradients);
    let expected = sgd().step(0.1, start.clone(), start.mean_gradients(&batch));
    assert_close(&net, &expected, 1e-5);
    assert_eq!(outside.updates().updates(), 1);
    assert_eq!(
        outside.flush(0.1, net.clone()).loss(&batch).into_scalar(),
        net.loss(&batch).into_scalar()
    );
}

#[test]
fn the_metric_shows_the_last_norm() {
    use burn::{
        data::dataloader::Progress,
        train::metric::{Metric, MetricMetadata, Numeric, NumericEntry},
    };
    let progress = || Progress {
        items_processed: 1,
        items_total: 1,
    };
    let metadata = MetricMetadata {
        progress: progress(),
        global_progress: progress(),
        iteration: Some(0),
        lr: None,
    };
    let start = net();
    let mut clipping = clipping(1.0);
    let mut metric = GradNormMetric::new(&clipping.norm);
    let mut gradients = GradientsParams::new();
    let three = Tensor::<Inner, 2>::from_data([[3.0]], &Default::default());
    let three = three.pad((0, 6, 0, 4), 0.0);
    gradients.register(start.first.weight.id, three);
    let _ = clipping.step(0.1, start, gradients);
    metric.update(&(), &metadata);
    assert!(matches!(metric.value(), NumericEntry::Value(3.0)));
}

#[test]
fn nothing_to_clip_and_nothing_to_clip_to() {
    let start = net();
    let mut clipping = clipping(1.0);
    let same = clipping.step(0.1, start.clone(), GradientsParams::new());
    assert_eq!(values(&same), values(&start));
    for max_norm in [0.0, -1.0, f32::NAN] {
        let error = ClipNorm::new(max_norm).unwrap_err().to_string();
        assert!(
            error.contains("max_norm") && error.contains("above 0"),
            "{error}"
        );
    }
}
