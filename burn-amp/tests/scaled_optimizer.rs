//! A step with a non-finite gradient anywhere changes nothing, and says why.

mod support;

use burn::{
    grad_clipping::GradientClippingConfig,
    module::{Module, ModuleVisitor, Param, list_param_ids},
    optim::{
        AdamConfig, AdamWConfig, GradientsParams, MultiGradientsParams, Optimizer, SgdConfig,
        momentum::MomentumConfig,
    },
    prelude::DeviceOps,
    tensor::{Device, Tensor},
};
use burn_amp::{Detection, GradScaler, GradScalerConfig, OverflowCause};
use burn_decorator::message::{self, Message};
use support::{B, Inner, Net, PATHS, gradients, net, state, values};

const LR: f64 = 0.1;

fn momentum() -> MomentumConfig {
    MomentumConfig::new().with_momentum(0.9)
}

/// The wrapper leaves out exactly the overflowing steps, bit for bit.
fn skips_exactly<O: Optimizer<Net<B>, B>>(optimizer: O) {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut scaled = scaler.wrap(optimizer.clone());
        let mut plain = optimizer.clone();
        let mut scaled_net = net();
        let mut plain_net = scaled_net.clone();

        for step in 0..40 {
            let overflowing: &[usize] = match step % 4 {
                1 => &[step % PATHS.len()],
                3 if step > 20 => &[0, 1, 2, 3, 4, 5],
                _ => &[],
            };
            scaled_net = scaled.step(
                LR,
                scaled_net.clone(),
                gradients(&scaled_net, step, overflowing),
            );
            if overflowing.is_empty() {
                plain_net = plain.step(LR, plain_net.clone(), gradients(&plain_net, step, &[]));
            }
            assert_eq!(
                values(&scaled_net),
                values(&plain_net),
                "{detection:?}, step {step}"
            );
        }
        assert_eq!(state(scaled.inner()), state(&plain), "{detection:?}");
        assert_eq!(state(&scaled.into_inner()), state(&plain), "{detection:?}");
        assert_eq!((scaler.steps(), scaler.skipped_steps()), (40, 15));
    }
}

#[test]
fn sgd_with_momentum_skips_exactly() {
    skips_exactly(
        SgdConfig::new()
            .with_momentum(Some(momentum()))
            .init::<B, Net<B>>(),
    );
}

#[test]
fn adam_skips_exactly() {
    skips_exactly(AdamConfig::new().init::<B, Net<B>>());
}

#[test]
fn adamw_skips_exactly() {
    skips_exactly(
        AdamWConfig::new()
            .with_weight_decay(0.1)
            .init::<B, Net<B>>(),
    );
}

#[test]
fn gradient_clipping_inside_sees_only_finite_gradients() {
    for clipping in [
        GradientClippingConfig::Norm(0.3),
        GradientClippingConfig::Value(0.2),
    ] {
        skips_exactly(
            AdamWConfig::new()
                .init::<B, Net<B>>()
                .with_grad_clipping(clipping.init()),
        );
    }
}

#[test]
fn parameters_still_require_gradients_after_a_step() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let mut optimizer = GradScaler::default()
            .with_detection(detection)
            .wrap(AdamConfig::new().init());
        let mut net = net();
        for overflowing in [&[][..], &[2]] {
            net = optimizer.step(LR, net.clone(), gradients(&net, 0, overflowing));
            assert!(requires_grad(&net).into_iter().all(|requires| requires));
        }
    }
}

fn requires_grad(net: &Net<B>) -> Vec<bool> {
    struct Reader(Vec<bool>);
    impl ModuleVisitor<B> for Reader {
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<B, D>>) {
            self.0.push(param.val().is_require_grad());
        }
    }
    let mut reader = Reader(Vec::new());
    net.visit(&mut reader);
    reader.0
}

#[test]
fn an_overflow_names_step_scale_and_parameters() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut optimizer = scaler.wrap(AdamConfig::new().init());
        let mut net = net();
        for (step, overflowing) in [&[][..], &[1, 4], &[3], &[]].into_iter().enumerate() {
            net = optimizer.step(LR, net.clone(), gradients(&net, step, overflowing));
            assert_eq!(scaler.skipped_last_step(), !overflowing.is_empty());
        }
        let overflow = scaler.last_overflow().unwrap();
        assert_eq!((overflow.step, overflow.scale), (3, 32768.0));
        assert_eq!(overflow.parameters, [PATHS[3]]);
        assert_eq!(overflow.cause, OverflowCause::Gradient);
        assert_eq!(scaler.scale(), 16384.0);
        assert_eq!(scaler.growth_tracker(), 1);
    }
}

#[test]
fn large_finite_gradients_are_no_overflow() {
    let scaler = GradScaler::default();
    let mut optimizer = scaler.wrap(SgdConfig::new().init());
    let net = net();
    let mut large = GradientsParams::new();
    let weight = list_param_ids(&net)[0];
    // Any sum over these is infinite.
    let gradient = Tensor::<Inner, 2>::full([5, 7], f32::MAX, &Default::default());
    large.register(weight, gradient);
    let _: Net<B> = optimizer.step(0.0, net, large);
    assert_eq!(scaler.skipped_steps(), 0);
}

#[test]
fn gradients_of_several_devices_are_one_step() {
    let device = Device::<Inner>::default().to_id();
    let several = |net: &Net<B>, step: usize, overflowing: &[usize]| MultiGradientsParams {
        grads: vec![
            (gradients(net, step, &[]), device),
            (gradients(net, step + 100, overflowing), device),
        ],
    };
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut scaled = scaler.wrap(AdamConfig::new().init::<B, Net<B>>());
        let mut plain = AdamConfig::new().init::<B, Net<B>>();
        let mut scaled_net = net();
        let mut plain_net = scaled_net.clone();
        for step in 0..12 {
            let overflowing: &[usize] = if step % 3 == 1 { &[4] } else { &[] };
            let multi = several(&scaled_net, step, overflowing);
            scaled_net = scaled.step_multi(LR, scaled_net, multi);
            if overflowing.is_empty() {
                let multi = several(&plain_net, step, &[]);
                plain_net = plain.step_multi(LR, plain_net, multi);
            }
            assert_eq!(values(&scaled_net), values(&plain_net));
        }
        assert_eq!(state(scaled.inner()), state(&plain));
        assert_eq!(scaler.last_overflow().unwrap().parameters, [PATHS[4]]);
    }
}

#[test]
fn finite_gradients_whose_sum_over_devices_overflows_are_skipped() {
    let device = Device::<Inner>::default().to_id();
    let scaler = GradScaler::default();
    let mut optimizer = scaler.wrap(SgdConfig::new().init());
    let net = net();
    let weight = list_param_ids(&net)[0];
    let half = || {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Inner, 2>::full([5, 7], f32::MAX, &Default::default());
        gradients.register(weight, gradient);
        (gradients, device)
    };
    let before = values(&net);
    let net: Net<B> = optimizer.step_multi(
        LR,
        net,
        MultiGradientsParams {
            grads: vec![half(), half()],
        },
    );
    assert_eq!(values(&net), before);
    assert_eq!(scaler.last_overflow().unwrap().parameters, [PATHS[0]]);
}

#[test]
fn a_disabled_scaler_changes_nothing() {
    let scaler = GradScaler::disabled();
    let mut scaled = scaler.wrap(AdamConfig::new().init::<B, Net<B>>());
    let mut plain = AdamConfig::new().init::<B, Net<B>>();
    let mut scaled_net = net();
    let mut plain_net = scaled_net.clone();
    for (step, overflowing) in [&[][..], &[], &[2]].into_iter().enumerate() {
        scaled_net = scaled.step(
            LR,
            scaled_net.clone(),
            gradients(&scaled_net, step, overflowing),
        );
        plain_net = plain.step(
            LR,
            plain_net.clone(),
            gradients(&plain_net, step, overflowing),
        );
        assert_eq!(values(&scaled_net), values(&plain_net));
    }
    assert_eq!(state(scaled.inner()), state(&plain));
    assert_eq!(
        (scaler.scale(), scaler.steps(), scaler.skipped_steps()),
        (1.0, 0, 0)
    );
}

#[test]
fn a_step_without_gradients_is_a_finite_step() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut optimizer = scaler.wrap(AdamConfig::new().init());
        let net = net();
        let before = values(&net);
        let net: Net<B> = optimizer.step(LR, net, GradientsParams::new());
        assert_eq!(values(&net), before);
        assert_eq!((scaler.steps(), scaler.skipped_steps()), (1, 0));
    }
}

/// Such as `burn_accum::flush`.
#[test]
fn a_message_to_what_is_inside_is_no_step() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut optimizer = scaler.wrap(AdamConfig::new().init());
        let net = net();
        let before = values(&net);
        let step = || optimizer.step(LR, net, GradientsParams::new());
        let net: Net<B> = message::send(Message::Flush, step);
        assert_eq!(values(&net), before);
        assert_eq!((scaler.steps(), scaler.growth_tracker()), (0, 0));
    }
}

#[test]
fn a_clone_keeps_its_own_moments_and_shares_the_scale() {
    for detection in [Detection::Sync, Detection::Deferred] {
        let scaler = GradScaler::default().with_detection(detection);
        let mut optimizer = scaler.wrap(AdamConfig::new().init());
        let mut net = net();
        net = optimizer.step(LR, net.clone(), gradients(&net, 0, &[]));
        net = optimizer.step(LR, net.clone(), gradients(&net, 1, &[0]));

        let snapshot = optimizer.clone();
        let saved = state(snapshot.inner());
        let _: Net<B> = optimizer.step(LR, net.clone(), gradients(&net, 2, &[]));
        assert_eq!(state(snapshot.inner()), saved);
        assert_ne!(state(optimizer.inner()), saved);
        assert_eq!(snapshot.scaler().steps(), 3);
    }
}

#[test]
fn a_scale_can_be_set() {
    let scaler = GradScaler::default();
    scaler.set_scale(512.0).unwrap();
    assert_eq!(scaler.scale(), 512.0);
    let subnormal = f32::MIN_POSITIVE / 4.0; // its inverse is infinite
    for scale in [0.0, -1.0, f32::NAN, f32::INFINITY, subnormal] {
        let error = scaler.set_scale(scale).unwrap_err().to_string();
        assert!(error.contains("scale = "), "{error}");
    }
    assert_eq!(scaler.scale(), 512.0);
}

#[test]
fn two_optimizers_may_share_a_scaler() {
    let run = |detection| {
        let scaler = GradScaler::default().with_detection(detection);
        let (mut one, mut other) = (
            scaler.wrap(AdamConfig::new().init()),
            scaler.wrap(SgdConfig::new().init()),
        );
        let (mut a, mut b) = (net(), net());
        for step in 0..12 {
            let overflow_a: &[usize] = if step % 3 == 0 { &[1] } else { &[] };
            let overflow_b: &[usize] = if step % 4 == 1 { &[2] } else { &[] };
            a = one.step(LR, a.clone(), gradients(&a, step, overflow_a));
            b = other.step(LR, b.clone(), gradients(&b, step, overflow_b));
        }
        (
            scaler.scale(),
            scaler.steps(),
            scaler.skipped_steps(),
            scaler.last_overflow(),
        )
    };
    assert_eq!(run(Detection::Sync), run(Detection::Deferred));
}

/// A scaler at 1024 that grows after two iterations, and a step of an optimizer under it, with an
/// overflow or without.
fn shared() -> (GradScaler, impl Fn() -> Box<dyn FnMut(bool)>) {
    let config = GradScalerConfig {
        init_scale: 1024.0,
        growth_interval: 2,
        ..Default::default()
    };
    let scaler = GradScaler::new(&config).unwrap();
    let optimizer = {
        let scaler = scaler.clone();
        move || {
            let mut optimizer = scaler.wrap(SgdConfig::new().init());
            let mut net = net();
            let step = move |overflows| {
                let overflowing: &[usize] = if overflows { &[0] } else { &[] };
                net = optimizer.step(LR, net.clone(), gradients(&net, 0, overflowing));
            };
            Box::new(step) as Box<dyn FnMut(bool)>
        }
    };
    (scaler, optimizer)
}

#[test]
fn two_optimizers_count_once_an_iteration() {
    let (scaler, optimizer) = shared();
    let (mut a, mut b) = (optimizer(), optimizer());
    let now = || (scaler.scale(), scaler.growth_tracker());
    for (before, after) in [((1024.0, 0), (1024.0, 1)), ((1024.0, 1), (2048.0, 0))] {
        a(false);
        assert_eq!(now(), before);
        b(false);
        assert_eq!(now(), after);
    }
    a(true);
    assert_eq!(now(), (1024.0, 0));
    b(true);
    assert_eq!(now(), (1024.0, 0));
    // One of the two overflows, so the iteration does not count towards growth.
    a(false);
    b(true);
    assert_eq!(now(), (512.0, 0));
}

#[test]
fn an_optimizer_that_steps_again_begins_an_iteration() {
    let (scaler, optimizer) = shared();
    let (mut often, mut rarely) = (optimizer(), optimizer());
    (0..3).for_each(|_| often(false));
    assert_eq!(scaler.scale(), 2048.0); // two iterations have ended
    rarely(false);
    assert_eq!(scaler.growth_tracker(), 1);
}

#[test]
fn an_optimizer_that_is_gone_is_not_waited_for() {
    let (scaler, optimizer) = shared();
    let (mut stays, goes) = (optimizer(), optimizer());
    drop(goes);
    (0..2).for_each(|_| stays(false));
    assert_eq!(scaler.scale(), 2048.0);
}
