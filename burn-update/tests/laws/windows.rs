//! k micro-batches are one batch of their union, and k - 1 change nothing.

use burn::optim::{MultiGradientsParams, SgdConfig};
use burn::prelude::DeviceOps;
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, AccumError, Accumulation, Counted};
use burn_amp::GradScalerConfig;
use burn_flex::FlexDevice;
use burn_update::{Update, UpdateError};

use crate::support::{F32, Half, Net, assert_close, bits, gradients, net};

fn sgd<B: AutodiffBackend>() -> Update<Net<B>, B> {
    Update::new(SgdConfig::new().init())
}

/// The rounding of f32 sums, and that of f16 products and activations.
const F32_ROUNDING: f32 = 2e-6;
const F16_ROUNDING: f32 = 4e-3;

/// Ten rows in parts of `lengths`, as one update.
fn in_parts<B: AutodiffBackend>(lengths: &[usize], config: AccumConfig) -> Net<B> {
    let mut update = sgd::<B>()
        .accumulate(config)
        .unwrap()
        .scale(GradScalerConfig::fixed(1024.0))
        .unwrap();
    let mut model = net::<B>();
    let (before, mut from) = (bits(&model), 0);
    for (index, length) in lengths.iter().enumerate() {
        let loss = model.loss(from, from + length);
        from += length;
        let gradients = if config == AccumConfig::tokens(config.steps) {
            update.backward(&model, Counted::mean(loss, *length))
        } else {
            update.backward(&model, loss)
        };
        model = update.step(0.1, model, gradients).unwrap();
        let is_last = index + 1 == lengths.len();
        assert_eq!(bits(&model) == before, !is_last, "micro-batch {index}");
        assert_eq!(update.updates(), u64::from(is_last));
    }
    model
}

fn parts_are_their_union<B: AutodiffBackend>(rounding: f32) {
    let mut plain = sgd::<B>().scale(GradScalerConfig::fixed(1024.0)).unwrap();
    let start = net::<B>();
    let loss = start.loss(0, 12);
    let gradients = plain.backward(&start, loss);
    let whole = plain.step(0.1, start, gradients).unwrap();

    let parts = in_parts(&[4, 4, 4], AccumConfig::mean(3));
    assert_close(&parts, &whole, rounding);
    let uneven = in_parts(&[3, 8, 1], AccumConfig::tokens(3));
    assert_close(&uneven, &whole, rounding);
}

#[test]
fn micro_batches_are_one_batch_of_their_union() {
    parts_are_their_union::<F32>(F32_ROUNDING);
    parts_are_their_union::<Half>(F16_ROUNDING);
}

#[test]
fn a_window_that_is_flushed_is_applied_with_its_true_weights() {
    let mut update = sgd::<F32>().accumulate(AccumConfig::mean(4)).unwrap();
    let mut whole = sgd::<F32>();
    let start = net::<F32>();

    let mut model = update.flush(0.1, start.clone()).unwrap();
    assert_eq!(bits(&model), bits(&start), "an empty window");
    for part in 0..2 {
        let loss = model.loss(4 * part, 4 * part + 4);
        let gradients = update.backward(&model, loss);
        model = update.step(0.1, model, gradients).unwrap();
    }
    assert_eq!(bits(&model), bits(&start));
    let model = update.flush(0.1, model).unwrap();
    assert_eq!(update.updates(), 1);

    let gradients = whole.backward(&start, start.loss(0, 8));
    let expected = whole.step(0.1, start, gradients).unwrap();
    assert_close(&model, &expected, F32_ROUNDING);
}

#[test]
fn without_a_scale_a_window_goes_on_without_a_micro_batch_that_is_not_finite() {
    let windows = Accumulation::new(AccumConfig::mean(3)).unwrap();
    let counter = windows.updates();
    let mut update = sgd::<F32>().accumulate(windows).unwrap();
    let mut model = net::<F32>();
    for step in 0..3 {
        let bad: &[usize] = if step == 1 { &[3] } else { &[] };
        let gradients = gradients(&model, step, bad);
        model = update.step(0.1, model, gradients).unwrap();
    }
    assert_eq!(
        (update.updates(), counter.updates(), counter.dropped()),
        (1, 1, 1)
    );
    assert_eq!(counter.last_dropped().unwrap().parameters, ["second.bias"]);
    assert!(
        bits(&model)
            .concat()
            .iter()
            .all(|&bits| f32::from_bits(bits).is_finite())
    );
}

/// Each device that brings gradients is a micro-batch.
#[test]
fn gradients_of_two_devices_are_two_micro_batches() {
    let mut update = sgd::<F32>().accumulate(AccumConfig::mean(2)).unwrap();
    let mut summed = sgd::<F32>();
    let start = net::<F32>();
    let of_devices = || {
        let of = |step| (gradients(&start, step, &[]), FlexDevice.to_id());
        MultiGradientsParams {
            grads: vec![of(0), of(1)],
        }
    };
    let first = update.step(0.1, start.clone(), of_devices()).unwrap();
    let mean_of_four = update.step(0.1, first, of_devices()).unwrap();
    // Without a window the sum over the devices: twice the mean of two equal halves.
    let sum = summed.step(0.05, start.clone(), of_devices()).unwrap();
    assert_eq!(update.updates(), 1);
    assert_close(&mean_of_four, &sum, F32_ROUNDING);
}

#[test]
fn counted_items_need_a_window_and_a_window_needs_counted_items() {
    let start = net::<F32>();
    let counted = || Counted::mean(start.loss(0, 4), 4);

    let mut plain = sgd::<F32>();
    let gradients = plain.backward(&start, counted());
    let error = plain.step(0.1, start.clone(), gradients).unwrap_err();
    assert!(
        matches!(error, UpdateError::ItemsWithoutAccumulation),
        "{error}"
    );

    let mut tokens = sgd::<F32>().accumulate(AccumConfig::tokens(2)).unwrap();
    let gradients = tokens.backward(&start, start.loss(0, 4));
    let error = tokens.step(0.1, start.clone(), gradients).unwrap_err();
    let expected = AccumError::MissingCount { micro_batch: 1 };
    assert_eq!(error.cause::<AccumError>(), Some(&expected));

    let error = sgd::<F32>().accumulate(AccumConfig::mean(0)).unwrap_err();
    assert!(error.cause::<AccumError>().is_some(), "{error}");
}
