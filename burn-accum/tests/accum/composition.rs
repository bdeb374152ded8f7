//! Together with burn-amp's loss scaling.

use burn::{
    backend::Autodiff,
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, MultiGradientsParams, SgdConfig},
    prelude::DeviceOps,
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::Tensor,
};
use burn_accum::{AccumConfig, Accumulation, ClipByNorm, Counted, NonFinite};
use burn_amp::{Autocast, F16, GradScaler, GradScalerConfig};
use burn_flex::{Flex, FlexDevice};
use burn_update::Update;

use crate::support::{B, Batch, Net, Windows, gradients, net, state, step, values};
use crate::tokens::Slotted;

fn adamw() -> Update<Net<B>, B> {
    let adamw = AdamWConfig::new().init::<B, Net<B>>();
    Update::new(adamw).clip_norm(1.0).unwrap()
}

/// Windows of so many micro-batches of clipped AdamW.
fn windows(steps: usize) -> Windows {
    Windows::of(
        adamw(),
        Accumulation::new(AccumConfig::mean(steps)).unwrap(),
    )
}

/// The same, scaled.
fn scaled(scaler: &GradScaler, steps: usize) -> Windows {
    windows(steps).scaled(scaler)
}

/// Wherever the overflow is in the window: it is dropped, the scale backs off at once, and the
/// window is completed with the next finite micro-batches.
#[test]
fn a_scaler_outside_drops_the_micro_batch() {
    for (bad, non_finite) in (0..4)
        .flat_map(|bad| [NonFinite::Drop, NonFinite::Propagate].map(|non_finite| (bad, non_finite)))
    {
        let scaler = GradScaler::default();
        let windows = Accumulation::new(AccumConfig::mean(3)).unwrap();
        let windows = Windows::of(adamw(), windows.with_non_finite(non_finite));
        let counter = windows.updates();
        let mut optimizer = windows.scaled(&scaler);
        let mut expected = self::windows(3);
        let (mut one, mut other) = {
            let net = net();
            (net.clone(), net)
        };
        for step in 0..7 {
            let overflow: &[usize] = if step == bad { &[1] } else { &[] };
            one = optimizer.step(0.1, one.clone(), gradients(&one, step, overflow, &[]));
            if step != bad {
                other = expected.step(0.1, other.clone(), gradients(&other, step, &[], &[]));
            }
        }
        assert_eq!(
            values(&one),
            values(&other),
            "overflow in {bad}, {non_finite:?}"
        );
        assert_eq!(scaler.scale(), 32768.0);
        assert_eq!((scaler.steps(), scaler.skipped_steps()), (7, 1));
        assert_eq!(counter.updates(), 2);
        assert_eq!(state(&optimizer.update), state(&expected.update));
    }
}

/// As with PyTorch's `scaler.update()`, once an optimizer step; an overflow lowers the scale at
/// once.
#[test]
fn a_scaler_outside_counts_updates_towards_growth() {
    let config = GradScalerConfig {
        growth_interval: 2,
        ..Default::default()
    };
    for read_each in [true, false] {
        let scaler = GradScaler::new(&config).unwrap();
        let now = || (scaler.scale(), scaler.growth_tracker());
        let mut optimizer = scaled(&scaler, 3);
        let mut net = net();
        let mut found = Vec::new();
        for step in 0..10 {
            let overflow: &[usize] = if step == 7 { &[1] } else { &[] };
            net = optimizer.step(0.1, net.clone(), gradients(&net, step, overflow, &[]));
            found.extend(read_each.then(&now));
        }
        let (low, high) = (65536.0, 131_072.0);
        let expected = [
            (low, 0),
            (low, 0),
            (low, 1),
            (low, 1),
            (low, 1),
            (high, 0),
            (high, 0),
            (low, 0),
            (low, 0),
            (low, 1),
        ];
        assert_eq!(now(), expected[9]);
        assert!(!read_each || found == expected, "{found:?}");
    }
}

/// The accumulation adds up the devices' gradients, not the scaler: their sum would be one
/// micro-batch.
#[test]
fn a_scaler_outside_leaves_the_devices_micro_batches_apart() {
    fn train(
        mut optimizer: Update<Slotted<B>, B>,
        start: &Slotted<B>,
        counted: bool,
    ) -> Vec<Vec<u32>> {
        let mut model = start.clone();
        for number in 0..2 {
            let mut multi = MultiGradientsParams::default();
            for part in 0..2 {
                let rows = 4 * number + 2 * part;
                let batch = Batch::rows(rows, rows + 2 + part);
                let loss = model.net.loss(&batch);
                let gradients = match counted {
                    true => Counted::mean(loss, batch.len()).backward(&model),
                    false => GradientsParams::from_grads(loss.backward(), &model),
                };
                multi.grads.push((gradients, FlexDevice.to_id()));
            }
            model = step(&mut optimizer, 0.1, model, multi);
        }
        values(&model.net)
    }
    let start = Slotted::new();
    for (config, counted) in [
        (AccumConfig::mean(2), false),
        (AccumConfig::tokens(2), true),
    ] {
        let windows = || {
            let sgd = SgdConfig::new().init::<B, Slotted<B>>();
            Update::new(sgd).accumulate(config).unwrap()
        };
        let scaled = windows().scale(GradScaler::default()).unwrap();
        let scaled = train(scaled, &start, counted);
        assert_eq!(scaled, train(windows(), &start, counted), "{config:?}");
    }
}

#[test]
fn a_tail_is_flushed_through_a_scaler() {
    let scaler = GradScaler::default();
    let mut optimizer = scaled(&scaler, 8);
    let counter = optimizer.updates();
    let start = net();
    let mut net = start.clone();
    for step in 0..2 {
        net = optimizer.step(0.1, net.clone(), gradients(&net, step, &[], &[]));
    }
    net = optimizer.flush(0.1, net);
    assert_eq!(counter.updates(), 1);
    assert_eq!(scaler.steps(), 2, "the flush is no step of the scaler");

    let mut expected = windows(2);
    let mut other = start.clone();
    for step in 0..2 {
        other = expected.step(0.1, other.clone(), gradients(&other, step, &[], &[]));
    }
    assert_eq!(values(&net), values(&other));
}

/// All parts in one file, in the middle of a window.
#[test]
fn one_record_holds_all() {
    let layers = || {
        let scaler = GradScaler::default();
        (scaler.clone(), scaled(&scaler, 3))
    };
    let step = |optimizer: &mut Windows, net: Net<B>, number| {
        let overflow: &[usize] = if number % 4 == 1 { &[2] } else { &[] };
        let gradients = gradients(&net, number, overflow, &[]);
        optimizer.step(0.1, net, gradients)
    };
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    for stop in 0..6 {
        let (scaler_one, mut one) = layers();
        let mut net_one = net();
        for number in 0..stop {
            net_one = step(&mut one, net_one, number);
        }
        let bytes = Recorder::<B>::record(&recorder, one.update.record(), ()).unwrap();
        let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
        let (scaler_other, other) = layers();
        let mut other = other.load(record);
        let mut net_other = net_one.clone();
        for number in stop..stop + 8 {
            net_one = step(&mut one, net_one, number);
            net_other = step(&mut other, net_other, number);
            assert_eq!(values(&net_one), values(&net_other));
        }
        assert_eq!(scaler_one.scale(), scaler_other.scale());
    }
}

/// The update of a flushed window makes parameters as that of a full one does: the scaler knows the
/// losses that are computed from them.
#[test]
fn losses_after_a_flushed_window_are_scaled() {
    type F = Autocast<Autodiff<Flex>, F16>;
    let device = Default::default();
    let scaler = GradScaler::default();
    let mut optimizer = Update::new(SgdConfig::new().init::<F, Linear<F>>())
        .accumulate(AccumConfig::mean(2))
        .unwrap()
        .scale(scaler)
        .unwrap();
    let mut model = LinearConfig::new(1, 1).init::<F>(&device);
    // At a scale of 65536 the gradient of 0.5 is finite in f16 and that of 1 is not.
    let gradient = |model: &Linear<F>, factor: f64| {
        let x = Tensor::<F, 2>::ones([1, 1], &device);
        (model.forward(x).mean() * factor).backward()
    };
    for _ in 0..2 {
        let gradients = GradientsParams::from_grads(gradient(&model, 0.5), &model);
        model = optimizer.step(0.1, model, gradients).unwrap();
        model = optimizer.flush(0.1, model).unwrap();
        let found = model.weight.grad(&gradient(&model, 1.0)).unwrap();
        assert_eq!(found.into_scalar(), f32::INFINITY);
    }
}
