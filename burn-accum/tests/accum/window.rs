//! What is in a window: missing gradients, tails, schedules, non-finite micro-batches, data types,
//! devices.

use burn::{
    module::{Module, ModuleMapper, Param},
    optim::{AdamWConfig, GradientsParams, MultiGradientsParams, SgdConfig},
    prelude::DeviceOps,
    tensor::{DType, Tensor},
};
use burn_accum::{AccumConfig, AccumError, Accumulation, Dropped, NonFinite, Normalization};
use burn_flex::FlexDevice;
use burn_update::Update;

use crate::support::{
    B, Inner, Net, PATHS, Windows, assert_close, floats, gradients, net, panic_of, state, values,
};

fn sgd(steps: usize) -> Windows {
    Windows::new(SgdConfig::new().init(), AccumConfig::mean(steps))
}

/// SGD in these windows.
fn sgd_in(windows: Accumulation) -> Windows {
    Windows::of(Update::new(SgdConfig::new().init()), windows)
}

#[test]
fn a_missing_gradient_is_zero_and_none_at_all_stays_none() {
    // Weight decay would move a parameter whose gradient is a made-up zero.
    let adamw = || AdamWConfig::new().with_weight_decay(0.1).init();
    let mut windows = Windows::new(adamw(), AccumConfig::mean(2));
    let start: Net<B> = net();
    let mut net = start.clone();
    net = windows.step(0.1, net.clone(), gradients(&net, 0, &[], &[1, 3]));
    net = windows.step(0.1, net.clone(), gradients(&net, 1, &[], &[2, 3]));

    let (before, after) = (floats(&start), floats(&net));
    assert_eq!(before[3], after[3], "no gradient, no step, no decay");
    assert_ne!(before[1], after[1]);
    assert_eq!(state(&windows.update).as_object().unwrap().len(), 3);

    let mut plain = sgd(2);
    let mut net = start.clone();
    net = plain.step(1.0, net.clone(), gradients(&net, 0, &[], &[1, 3]));
    net = plain.step(1.0, net.clone(), gradients(&net, 1, &[], &[2, 3]));
    let after = floats(&net);
    for (index, (before, after)) in before[1].iter().zip(&after[1]).enumerate() {
        let gradient = ((index * 31 + 17 + 7) as f32).sin();
        assert!((before - gradient / 2.0 - after).abs() < 1e-6);
    }
}

#[test]
fn a_tail_is_divided_by_what_is_in_it() {
    let start = net();
    let tail = || {
        let mut windows = sgd(8);
        let mut net = start.clone();
        for step in 0..3 {
            net = windows.step(0.5, net.clone(), gradients(&net, step, &[], &[]));
        }
        net = windows.flush(0.5, net);
        let counter = windows.updates();
        assert_eq!((counter.updates(), counter.micro_step()), (1, 0));
        let again = windows.flush(0.5, net.clone());
        assert_eq!(
            values(&again),
            values(&net),
            "there is nothing left to flush"
        );
        assert_eq!(counter.updates(), 1);
        net
    };
    let flushed = tail();

    let mut three = sgd(3);
    let mut net = start.clone();
    for step in 0..3 {
        net = three.step(0.5, net.clone(), gradients(&net, step, &[], &[]));
    }
    assert_eq!(values(&net), values(&flushed));
}

#[test]
fn no_window_is_empty() {
    let error = Accumulation::new(AccumConfig::mean(0)).unwrap_err();
    assert_eq!(error, AccumError::ZeroSteps);
}

/// Drops the bad one wherever it is: the update is that of the others.
#[test]
fn a_non_finite_micro_batch_is_dropped_with_its_weight() {
    for bad in 0..3 {
        let start = net();
        let mut windows = sgd(3);
        let mut others = sgd(2);
        let (mut net, mut expected) = (start.clone(), start.clone());
        for step in 0..3 {
            let culprits: &[usize] = if step == bad { &[0, 2] } else { &[] };
            net = windows.step(0.1, net.clone(), gradients(&net, step, culprits, &[]));
            if step != bad {
                let gradients = gradients(&expected, step, &[], &[]);
                expected = others.step(0.1, expected, gradients);
            }
        }
        assert_eq!(values(&net), values(&expected));
        let counter = windows.updates();
        assert_eq!((counter.updates(), counter.dropped()), (1, 1));
        assert_eq!((counter.micro_batches(), counter.skipped_updates()), (3, 0));
        let dropped = Dropped {
            micro_batch: bad as u64 + 1,
            updates: 0,
            parameters: vec![PATHS[0].to_owned(), PATHS[2].to_owned()],
        };
        assert_eq!(counter.last_dropped(), Some(dropped));
    }
}

#[test]
fn a_window_of_nothing_is_skipped_and_the_next_one_is_not() {
    let mut windows = Windows::new(AdamWConfig::new().init(), AccumConfig::mean(2));
    let start = net();
    let mut net = start.clone();
    for step in 0..2 {
        net = windows.step(0.1, net.clone(), gradients(&net, step, &[step], &[]));
    }
    assert_eq!(values(&net), values(&start));
    assert_eq!(state(&windows.update), serde_json::json!({}));
    let counter = windows.updates();
    assert_eq!((counter.updates(), counter.skipped_updates()), (0, 1));
    for step in 0..2 {
        net = windows.step(0.1, net.clone(), gradients(&net, step, &[], &[]));
    }
    assert_ne!(values(&net), values(&start));
    assert_eq!((counter.updates(), counter.skipped_updates()), (1, 1));
}

#[test]
fn a_training_of_nothing_stops() {
    let mut windows = sgd(1);
    let net = net();
    let message = panic_of(|| {
        for step in 0..101 {
            let _ = windows.step(0.1, net.clone(), gradients(&net, step, &[3], &[]));
        }
    });
    assert_eq!(windows.updates().skipped_updates(), 100);
    assert!(
        message.contains("last 100 windows") && message.contains("second.bias"),
        "{message}"
    );
}

#[test]
fn a_propagated_micro_batch_reaches_the_optimizer() {
    let windows = Accumulation::new(AccumConfig::mean(2)).unwrap();
    let mut windows = sgd_in(windows.with_non_finite(NonFinite::Propagate));
    let mut net = net();
    for step in 0..2 {
        let bad: &[usize] = if step == 0 { &[1] } else { &[] };
        net = windows.step(0.1, net.clone(), gradients(&net, step, bad, &[]));
    }
    assert!(floats(&net)[1].iter().any(|value| !value.is_finite()));
    assert!(floats(&net)[0].iter().all(|value| value.is_finite()));
    assert_eq!(windows.updates().dropped(), 0);
}

/// Large finite gradients: their sum over the elements overflows, which is no reason to drop them.
#[test]
fn large_gradients_are_not_mistaken_for_infinite_ones() {
    let start = net();
    let large = |net: &Net<B>| {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Inner, 2>::full([5, 7], f32::MAX / 4.0, &Default::default());
        gradients.register(net_first_weight(net), gradient);
        gradients
    };
    let mut windows = sgd(1);
    let net = windows.step(1e-38, start.clone(), large(&start));
    assert_ne!(values(&net), values(&start));
    assert_eq!(windows.updates().dropped(), 0);

    // But of eight such micro-batches the sum itself overflows, and that must not get through.
    let mut windows = sgd(8);
    let mut net = start.clone();
    for _ in 0..8 {
        net = windows.step(1e-38, net.clone(), large(&net));
    }
    assert_eq!(values(&net), values(&start));
    let counter = windows.updates();
    assert_eq!(
        (
            counter.updates(),
            counter.skipped_updates(),
            counter.dropped()
        ),
        (0, 1, 0)
    );
}

fn net_first_weight(net: &Net<B>) -> burn::module::ParamId {
    burn::module::list_param_ids(net)[0]
}

struct ToBf16;

impl ModuleMapper<B> for ToBf16 {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<B, D>>) -> Param<Tensor<B, D>> {
        param.map(|tensor| Tensor::from_inner(tensor.inner().cast(DType::BF16)).require_grad())
    }
}

/// bf16 has 8 bits: 256 + 1 is 256. In f32 the ones are not lost.
#[test]
fn half_precision_gradients_are_summed_in_f32() {
    let net = net().map(&mut ToBf16);
    let id = net_first_weight(&net);
    let gradients = |value: f32| {
        let mut gradients = GradientsParams::new();
        let gradient = Tensor::<Inner, 2>::full([5, 7], value, &Default::default());
        gradients.register(id, gradient.cast(DType::BF16));
        gradients
    };
    let config = AccumConfig {
        steps: 17,
        normalization: Normalization::Sum,
    };
    let mut windows = Windows::new(SgdConfig::new().init(), config);
    let mut trained = windows.step(1.0, net.clone(), gradients(256.0));
    for _ in 0..16 {
        trained = windows.step(1.0, trained, gradients(1.0));
    }
    // -272 within bf16's spacing of 2; adding ones to 256 in bf16 would have stayed there.
    assert!(
        floats(&trained)[0]
            .iter()
            .all(|weight| (weight + 272.0).abs() <= 2.0)
    );
}

/// Two devices' micro-batches are two micro-batches.
#[test]
fn several_devices_bring_several_micro_batches() {
    let device = FlexDevice.to_id();
    let start = net();
    let mut windows = sgd(2);
    let mut net = start.clone();
    for step in [0, 2] {
        let mut multi = MultiGradientsParams::default();
        for part in 0..2 {
            multi
                .grads
                .push((gradients(&net, step + part, &[], &[]), device));
        }
        // A device that has run out of data.
        multi.grads.push((GradientsParams::new(), device));
        net = windows.step(0.1, net, multi);
    }
    assert_eq!(windows.updates().micro_batches(), 4);

    let mut four = sgd(4);
    let mut expected = start;
    for step in 0..4 {
        expected = four.step(0.1, expected.clone(), gradients(&expected, step, &[], &[]));
    }
    assert_close(&net, &expected, 1e-6);
}

#[test]
fn a_culprit_on_two_devices_is_named_once() {
    let net = net();
    let mut multi = MultiGradientsParams::default();
    for step in 0..2 {
        let gradients = gradients(&net, step, &[1], &[]);
        multi.grads.push((gradients, FlexDevice.to_id()));
    }
    let mut windows = sgd(2);
    let _ = windows.step(0.1, net, multi);
    let counter = windows.updates();
    assert_eq!(counter.dropped(), 2);
    assert_eq!(counter.last_dropped().unwrap().parameters, [PATHS[1]]);
}

#[test]
fn clones_have_their_own_windows() {
    let mut one = sgd(2);
    let start = net();
    let net = one.step(0.1, start.clone(), gradients(&start, 0, &[], &[]));
    let mut other = one.clone();
    let left = one.step(0.1, net.clone(), gradients(&start, 1, &[], &[]));
    let right = other.step(0.1, net.clone(), gradients(&start, 1, &[], &[]));
    assert_eq!(values(&left), values(&right));
    assert_ne!(values(&left), values(&start));
}
