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
use burn_amp::{GradScaler, GradScalerConfig, OverflowCause};
use support::{B, Inner, Net, PATHS, gradients, net, scaled, state, state_of, values};

const LR: f64 = 0.1;

fn momentum() -> MomentumConfig {
    MomentumConfig::new().with_momentum(0.9)
}

/// The update leaves out exactly the overflowing steps, bit for bit.
fn skips_exactly<O: Optimizer<Net<B>, B> + 'static>(optimizer: O) {
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, optimizer.clone());
    let mut plain = optimizer;
    let mut scaled_net = net();
    let mut plain_net = scaled_net.clone();

    for step in 0..40 {
        let overflowing: &[usize] = match step % 4 {
            1 => &[step % PATHS.len()],
            3 if step > 20 => &[0, 1, 2, 3, 4, 5],
            _ => &[],
        };
        let made_up = gradients(&scaled_net, step, overflowing);
        scaled_net = update.step(LR, scaled_net, made_up).unwrap();
        if overflowing.is_empty() {
            plain_net = plain.step(LR, plain_net.clone(), gradients(&plain_net, step, &[]));
        }
        assert_eq!(values(&scaled_net), values(&plain_net), "step {step}");
    }
    assert_eq!(state(&update), state_of(&plain));
    assert_eq!((scaler.steps(), scaler.skipped_steps()), (40, 15));
    assert_eq!(update.updates(), 25);
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
    let mut update = scaled(&GradScaler::default(), AdamConfig::new().init());
    let mut net = net();
    for overflowing in [&[][..], &[2]] {
        let gradients = gradients(&net, 0, overflowing);
        net = update.step(LR, net, gradients).unwrap();
        assert!(requires_grad(&net).into_iter().all(|requires| requires));
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
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, AdamConfig::new().init());
    let mut net = net();
    for (step, overflowing) in [&[][..], &[1, 4], &[3], &[]].into_iter().enumerate() {
        let gradients = gradients(&net, step, overflowing);
        net = update.step(LR, net, gradients).unwrap();
        assert_eq!(scaler.skipped_last_step(), !overflowing.is_empty());
    }
    let overflow = scaler.last_overflow().unwrap();
    assert_eq!((overflow.step, overflow.scale), (3, 32768.0));
    assert_eq!(overflow.parameters, [PATHS[3]]);
    assert_eq!(overflow.cause, OverflowCause::Gradient);
    assert_eq!(scaler.scale(), 16384.0);
    assert_eq!(scaler.growth_tracker(), 1);
}

#[test]
fn large_finite_gradients_are_no_overflow() {
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, SgdConfig::new().init());
    let net = net();
    let mut large = GradientsParams::new();
    let weight = list_param_ids(&net)[0];
    // Any sum over these is infinite.
    let gradient = Tensor::<Inner, 2>::full([5, 7], f32::MAX, &Default::default());
    large.register(weight, gradient);
    let _: Net<B> = update.step(0.0, net, large).unwrap();
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
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, AdamConfig::new().init::<B, Net<B>>());
    let mut plain = AdamConfig::new().init::<B, Net<B>>();
    let mut scaled_net = net();
    let mut plain_net = scaled_net.clone();
    for step in 0..12 {
        let overflowing: &[usize] = if step % 3 == 1 { &[4] } else { &[] };
        let multi = several(&scaled_net, step, overflowing);
        scaled_net = update.step(LR, scaled_net, multi).unwrap();
        if overflowing.is_empty() {
            let multi = several(&plain_net, step, &[]);
            plain_net = plain.step_multi(LR, plain_net, multi);
        }
        assert_eq!(values(&scaled_net), values(&plain_net));
    }
    assert_eq!(state(&update), state_of(&plain));
    assert_eq!(scaler.last_overflow().unwrap().parameters, [PATHS[4]]);
}

#[test]
fn finite_gradients_whose_sum_over_devices_overflows_are_skipped() {
    let device = Device::<Inner>::default().to_id();
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, SgdConfig::new().init());
    let net = net();
    let weight = list_param_ids(&net)[0];
    let half = || {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Inner, 2>::full([5, 7], f32::MAX, &Default::default());
        gradients.register(weight, gradient);
        (gradients, device)
    };
    let before = values(&net);
    let grads = vec![half(), half()];
    let net: Net<B> = update
        .step(LR, net, MultiGradientsParams { grads })
        .unwrap();
    assert_eq!(values(&net), before);
    assert_eq!(scaler.last_overflow().unwrap().parameters, [PATHS[0]]);
}

#[test]
fn a_disabled_scaler_changes_nothing() {
    let scaler = GradScaler::disabled();
    let mut update = scaled(&scaler, AdamConfig::new().init::<B, Net<B>>());
    let mut plain = AdamConfig::new().init::<B, Net<B>>();
    let mut scaled_net = net();
    let mut plain_net = scaled_net.clone();
    for (step, overflowing) in [&[][..], &[], &[2]].into_iter().enumerate() {
        let made_up = gradients(&scaled_net, step, overflowing);
        scaled_net = update.step(LR, scaled_net, made_up).unwrap();
        plain_net = plain.step(
            LR,
            plain_net.clone(),
            gradients(&plain_net, step, overflowing),
        );
        assert_eq!(values(&scaled_net), values(&plain_net));
    }
    assert_eq!(state(&update), state_of(&plain));
    assert_eq!(
        (scaler.scale(), scaler.steps(), scaler.skipped_steps()),
        (1.0, 0, 0)
    );
}

#[test]
fn a_step_without_gradients_is_a_finite_step() {
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, AdamConfig::new().init());
    let net = net();
    let before = values(&net);
    let net: Net<B> = update.step(LR, net, GradientsParams::new()).unwrap();
    assert_eq!(values(&net), before);
    assert_eq!((scaler.steps(), scaler.skipped_steps()), (1, 0));
}

#[test]
fn a_flush_is_no_step() {
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, AdamConfig::new().init());
    let net = net();
    let before = values(&net);
    let net: Net<B> = update.flush(LR, net).unwrap();
    assert_eq!(values(&net), before);
    assert_eq!((scaler.steps(), scaler.growth_tracker()), (0, 0));
}

#[test]
fn a_clone_keeps_its_own_moments_and_shares_the_scale() {
    let scaler = GradScaler::default();
    let mut update = scaled(&scaler, AdamConfig::new().init());
    let mut net = net();
    net = update
        .step(LR, net.clone(), gradients(&net, 0, &[]))
        .unwrap();
    net = update
        .step(LR, net.clone(), gradients(&net, 1, &[0]))
        .unwrap();

    let snapshot = update.clone();
    let saved = state(&snapshot);
    let _: Net<B> = update
        .step(LR, net.clone(), gradients(&net, 2, &[]))
        .unwrap();
    assert_eq!(state(&snapshot), saved);
    assert_ne!(state(&update), saved);
    assert_eq!(scaler.steps(), 3);
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
    let scaler = GradScaler::default();
    let mut one = scaled(&scaler, AdamConfig::new().init());
    let mut other = scaled(&scaler, SgdConfig::new().init());
    let (mut a, mut b) = (net(), net());
    for step in 0..12 {
        let overflow_a: &[usize] = if step % 3 == 0 { &[1] } else { &[] };
        let overflow_b: &[usize] = if step % 4 == 1 { &[2] } else { &[] };
        let of_a = gradients(&a, step, overflow_a);
        a = one.step(LR, a, of_a).unwrap();
        let of_b = gradients(&b, step, overflow_b);
        b = other.step(LR, b, of_b).unwrap();
    }
    // Iterations 0, 1, 3, 5, 6 and 9 overflow, the last one in both networks.
    assert_eq!(scaler.scale(), 1024.0);
    assert_eq!((scaler.steps(), scaler.skipped_steps()), (24, 7));
    let last = scaler.last_overflow().unwrap();
    assert_eq!((last.step, last.scale), (20, 1024.0));
    assert_eq!(last.parameters, [PATHS[2]]);
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
            let mut update = scaled(&scaler, SgdConfig::new().init());
            let mut net = net();
            let step = move |overflows| {
                let overflowing: &[usize] = if overflows { &[0] } else { &[] };
                net = update
                    .step(LR, net.clone(), gradients(&net, 0, overflowing))
                    .unwrap();
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
