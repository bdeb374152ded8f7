//! Together with burn-amp's loss scaling.

use burn::{
    backend::Autodiff,
    lr_scheduler::{LrScheduler, linear::LinearLrSchedulerConfig},
    nn::{Linear, LinearConfig},
    optim::{AdamWConfig, GradientsParams, MultiGradientsParams, Optimizer, SgdConfig},
    prelude::DeviceOps,
    record::{FullPrecisionSettings, NamedMpkBytesRecorder, Recorder},
    tensor::Tensor,
};
use burn_accum::{AccumConfig, ClipGlobalNorm, Counted, MultiSteps, NonFinite, PerUpdate, flush};
use burn_amp::{Autocast, Detection, F16, GradScaler, GradScalerConfig, ScaledOptimizer};
use burn_flex::{Flex, FlexDevice};

use crate::support::{B, Batch, Net, gradients, net, panic_of, state, values};
use crate::tokens::Slotted;

fn adamw() -> impl Optimizer<Net<B>, B> {
    ClipGlobalNorm::new(AdamWConfig::new().init::<B, Net<B>>(), 1.0).unwrap()
}

fn scaler(detection: Detection) -> GradScaler {
    GradScaler::new(GradScalerConfig::default())
        .unwrap()
        .with_detection(detection)
}

/// Wherever the overflow is in the window: it is dropped, the scale backs off at once, and the
/// window is completed with the next finite micro-batches.
#[test]
fn a_scaler_outside_drops_the_micro_batch() {
    for (bad, detection, non_finite) in (0..4).flat_map(|bad| {
        [Detection::Sync, Detection::Deferred]
            .into_iter()
            .flat_map(move |detection| {
                [NonFinite::Drop, NonFinite::Propagate]
                    .map(|non_finite| (bad, detection, non_finite))
            })
    }) {
        let scaler = scaler(detection);
        let windows = MultiSteps::new(adamw(), AccumConfig::mean(3)).unwrap();
        let windows = windows.with_non_finite(non_finite);
        let counter = windows.updates();
        let mut optimizer = scaler.wrap(windows);
        let mut expected = MultiSteps::new(adamw(), AccumConfig::mean(3)).unwrap();
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
            "overflow in {bad}, {detection:?}, {non_finite:?}"
        );
        assert_eq!(scaler.scale(), 32768.0);
        assert_eq!((scaler.steps(), scaler.skipped_steps()), (7, 1));
        assert_eq!(counter.updates(), 2);
        assert_eq!(state(optimizer.inner().inner()), state(expected.inner()));
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
    for detection in [Detection::Sync, Detection::Deferred] {
        for read_each in [true, false] {
            let scaler = GradScaler::new(&config).unwrap().with_detection(detection);
            let now = || (scaler.scale(), scaler.growth_tracker());
            let windows = MultiSteps::new(adamw(), AccumConfig::mean(3)).unwrap();
            let mut optimizer = scaler.wrap(windows);
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
            assert_eq!(now(), expected[9], "{detection:?}");
            assert!(!read_each || found == expected, "{detection:?}: {found:?}");
        }
    }
}

/// PyTorch's order: the scaler sees the window's gradient once, and skips the whole window.
#[test]
fn a_scaler_inside_skips_the_window() {
    for bad in 0..3 {
        let scaler = scaler(Detection::Sync);
        let config = AccumConfig::mean(3);
        let mut optimizer = MultiSteps::new(scaler.wrap(adamw()), config)
            .unwrap()
            .with_non_finite(NonFinite::Propagate);
        let falling = LinearLrSchedulerConfig::new(1.0, 0.0, 10).init().unwrap();
        let taken = scaler.clone();
        let mut scheduler =
            PerUpdate::from_fn(falling, move || taken.steps() - taken.skipped_steps());
        let start = net();
        let mut net = start.clone();
        let mut rates = Vec::new();
        for step in 0..6 {
            let lr = scheduler.step();
            rates.push((lr * 10.0).round());
            let overflow: &[usize] = if step == bad { &[1] } else { &[] };
            net = optimizer.step(lr, net.clone(), gradients(&net, step, overflow, &[]));
            assert_eq!(values(&net) == values(&start), step < 5);
        }
        assert_eq!(scaler.scale(), 32768.0);
        assert_eq!((scaler.steps(), scaler.skipped_steps()), (2, 1));
        assert_eq!(rates, [10.0; 6], "nothing was updated yet");
        assert_eq!(scheduler.step(), 0.9);
    }
}

#[test]
fn a_scaler_that_would_never_see_an_overflow_is_refused() {
    let scaler = scaler(Detection::Sync);
    let mut optimizer = MultiSteps::new(scaler.wrap(adamw()), AccumConfig::mean(3)).unwrap();
    let net = net();
    let message = panic_of(|| optimizer.step(0.1, net.clone(), gradients(&net, 0, &[], &[])));
    assert!(message.contains("ScaledOptimizer<"), "{message}");
    assert!(
        message.contains("scaler.wrap(MultiSteps::new(..))"),
        "{message}"
    );

    // Also with something in between.
    let clipped = ClipGlobalNorm::new(scaler.wrap(adamw()), 1.0).unwrap();
    let mut optimizer = MultiSteps::new(clipped, AccumConfig::mean(3)).unwrap();
    panic_of(|| optimizer.step(0.1, net.clone(), gradients(&net, 0, &[], &[])));
}

/// The scaler leaves it to the `MultiSteps` to add up the devices' gradients: their sum would be
/// one micro-batch.
#[test]
fn a_scaler_outside_leaves_the_devices_micro_batches_apart() {
    fn train(
        mut optimizer: impl Optimizer<Slotted<B>, B>,
        start: &Slotted<B>,
        counted: bool,
    ) -> Vec<Vec<u32>> {
        let mut model = start.clone();
        for step in 0..2 {
            let mut multi = MultiGradientsParams::default();
            for part in 0..2 {
                let rows = 4 * step + 2 * part;
                let batch = Batch::rows(rows, rows + 2 + part);
                let loss = model.net.loss(&batch);
                let gradients = match counted {
                    true => Counted::mean(loss, batch.len()).backward(&model),
                    false => GradientsParams::from_grads(loss.backward(), &model),
                };
                multi.grads.push((gradients, FlexDevice.to_id()));
            }
            model = optimizer.step_multi(0.1, model, multi);
        }
        values(&model.net)
    }
    let start = Slotted::new();
    for detection in [Detection::Sync, Detection::Deferred] {
        for (config, counted) in [
            (AccumConfig::mean(2), false),
            (AccumConfig::tokens(2), true),
        ] {
            let windows = || MultiSteps::new(SgdConfig::new().init(), config).unwrap();
            let scaled = scaler(detection).wrap(windows());
            let scaled = train(scaled, &start, counted);
            assert_eq!(scaled, train(windows(), &start, counted), "{config:?}");
        }
    }
}

#[test]
fn a_tail_is_flushed_through_a_scaler() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = scaler(detection);
        let windows = MultiSteps::new(adamw(), AccumConfig::mean(8)).unwrap();
        let counter = windows.updates();
        let mut optimizer = scaler.wrap(windows);
        let start = net();
        let mut net = start.clone();
        for step in 0..2 {
            net = optimizer.step(0.1, net.clone(), gradients(&net, step, &[], &[]));
        }
        net = flush(|nothing| optimizer.step(0.1, net, nothing));
        assert_eq!(counter.updates(), 1);
        assert_eq!(scaler.steps(), 2, "the message is no step of the scaler");

        let mut expected = MultiSteps::new(adamw(), AccumConfig::mean(2)).unwrap();
        let mut other = start.clone();
        for step in 0..2 {
            other = expected.step(0.1, other.clone(), gradients(&other, step, &[], &[]));
        }
        assert_eq!(values(&net), values(&other));
    }
}

/// All layers in one file, in the middle of a window.
#[test]
fn records_nest() {
    type Layers<O> = ScaledOptimizer<MultiSteps<O>>;
    fn layers<O: Optimizer<Net<B>, B>>(inner: O) -> (GradScaler, Layers<O>) {
        let scaler = scaler(Detection::Sync);
        let windows = MultiSteps::new(inner, AccumConfig::mean(3)).unwrap();
        (scaler.clone(), scaler.wrap(windows))
    }
    let step = |optimizer: &mut Layers<_>, net: Net<B>, number| {
        let overflow: &[usize] = if number % 4 == 1 { &[2] } else { &[] };
        let gradients = gradients(&net, number, overflow, &[]);
        optimizer.step(0.1, net, gradients)
    };
    let recorder = NamedMpkBytesRecorder::<FullPrecisionSettings>::default();
    for stop in 0..6 {
        let (scaler_one, mut one) = layers(adamw());
        let mut net_one = net();
        for number in 0..stop {
            net_one = step(&mut one, net_one, number);
        }
        let record = Optimizer::<Net<B>, B>::to_record(&one);
        let bytes = Recorder::<B>::record(&recorder, record, ()).unwrap();
        let record = Recorder::<B>::load(&recorder, bytes, &Default::default()).unwrap();
        let (scaler_other, other) = layers(adamw());
        let mut other = Optimizer::<Net<B>, B>::load_record(other, record);
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
    let windows = MultiSteps::new(
        SgdConfig::new().init::<F, Linear<F>>(),
        AccumConfig::mean(2),
    );
    let mut optimizer = scaler.wrap(windows.unwrap());
    let mut model = LinearConfig::new(1, 1).init::<F>(&device);
    // At a scale of 65536 the gradient of 0.5 is finite in f16 and that of 1 is not.
    let gradient = |model: &Linear<F>, factor: f64| {
        let x = Tensor::<F, 2>::ones([1, 1], &device);
        (model.forward(x).mean() * factor).backward()
    };
    for _ in 0..2 {
        let gradients = GradientsParams::from_grads(gradient(&model, 0.5), &model);
        model = optimizer.step(0.1, model, gradients);
        model = flush(|nothing| optimizer.step(0.1, model, nothing));
        let found = model.weight.grad(&gradient(&model, 1.0)).unwrap();
        assert_eq!(found.into_scalar(), f32::INFINITY);
    }
}
