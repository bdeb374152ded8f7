//! The count of items.

use burn::{
    module::Module,
    optim::{AdamWConfig, GradientsAccumulator, MultiGradientsParams, Optimizer, SgdConfig},
    prelude::DeviceOps,
    tensor::{Int, Tensor, backend::Backend},
};
use burn_accum::{
    AccumConfig, Accumulation, ClipNorm, CountSlot, Counted, NonFinite, Normalization,
};
use burn_flex::FlexDevice;
use burn_update::Update;

use crate::support::{
    B, Batch, Net, Windows, assert_close, gradients, net, panic_of, state, values,
};

fn windows(config: AccumConfig) -> Windows {
    Windows::new(SgdConfig::new().init(), config)
}

/// A window with the gradients of losses over so many items.
fn step(config: AccumConfig, items: f64) -> String {
    let net = net();
    let gradients = || Counted::sum(net.loss(&Batch::rows(0, 3)), items).backward(&net);
    let mut windows = windows(config);
    panic_of(|| {
        (0..config.steps)
            .map(|_| windows.step(0.1, net.clone(), gradients()))
            .last()
    })
}

#[test]
fn forgetting_the_count_is_an_error_at_once() {
    let net = net();
    for non_finite in [NonFinite::Drop, NonFinite::Propagate] {
        let windows = Accumulation::new(AccumConfig::tokens(4)).unwrap();
        let sgd = Update::new(SgdConfig::new().init());
        let mut windows = Windows::of(sgd, windows.with_non_finite(non_finite));
        let message = panic_of(|| windows.step(0.1, net.clone(), gradients(&net, 0, &[], &[])));
        assert!(
            message.contains("micro-batch 1 does not tell how many items"),
            "{message}"
        );
        assert!(message.contains("Counted::mean(loss, items)"), "{message}");
    }
}

/// Also after micro-batches that the host has not read yet.
#[test]
fn a_refused_micro_batch_is_named_by_its_number() {
    let net = net();
    let plain = || gradients(&net, 0, &[], &[]);
    let counted = || Counted::sum(net.loss(&Batch::rows(0, 3)), 3).backward(&net);
    let message = |config, before: &dyn Fn() -> _, last: &dyn Fn() -> _| {
        let mut windows = windows(config);
        for _ in 0..4 {
            windows.step(0.1, net.clone(), before());
        }
        panic_of(|| windows.step(0.1, net.clone(), last()))
    };
    let missing = message(AccumConfig::tokens(8), &counted, &plain);
    assert!(missing.contains("micro-batch 5 does not tell"), "{missing}");
    let unexpected = message(AccumConfig::mean(8), &plain, &counted);
    assert!(unexpected.contains("micro-batch 5 holds"), "{unexpected}");
}

/// Also on one of several devices.
#[test]
fn each_device_has_to_count() {
    let net = net();
    let counted = Counted::mean(net.loss(&Batch::rows(0, 3)), 3).backward(&net);
    let mut multi = MultiGradientsParams::default();
    for gradients in [counted, gradients(&net, 0, &[], &[])] {
        multi.grads.push((gradients, FlexDevice.to_id()));
    }
    let mut windows = windows(AccumConfig::tokens(4));
    let message = panic_of(|| windows.step(0.1, net.clone(), multi));
    assert!(
        message.contains("does not tell how many items"),
        "{message}"
    );
}

#[test]
fn impossible_counts_are_refused() {
    for items in [-1.0, f64::NAN, f64::INFINITY] {
        let message = step(AccumConfig::tokens(2), items);
        assert!(
            message.contains(&format!("micro-batch 1 counts {items} items")),
            "{message}"
        );
    }
    let message = step(AccumConfig::tokens(1), 0.0);
    assert!(
        message.contains("1 micro-batches of the window after update 0 count no items"),
        "{message}"
    );
    let message = step(AccumConfig::mean(2), 7.0);
    assert!(
        message.contains("loss sum over 7 counted items"),
        "{message}"
    );
}

#[test]
fn a_micro_batch_without_items_counts_nothing() {
    let start = net();
    let (all, first) = (Batch::rows(0, 6), Batch::rows(0, 4));
    let train = |padding: bool| {
        let mut windows = windows(AccumConfig::tokens(if padding { 2 } else { 1 }));
        let mut net = start.clone();
        let gradients = Counted::mean(net.loss(&first), 4).backward(&net);
        net = windows.step(0.1, net, gradients);
        if padding {
            let nothing = net.loss(&all) * 0.0;
            let gradients = Counted::sum(nothing, 0).backward(&net);
            net = windows.step(0.1, net, gradients);
        }
        values(&net)
    };
    assert_eq!(train(true), train(false));
}

#[test]
fn counts_may_be_tensors() {
    let net = net();
    let device = Default::default();
    let batch = Batch::rows(0, 6);
    let trained = |count: Counted<B>| {
        let mut windows = windows(AccumConfig::tokens(1));
        values(&windows.step(0.1, net.clone(), count.backward(&net)))
    };
    let expected = trained(Counted::mean(net.loss(&batch), 6));
    let int = Tensor::<B, 1, Int>::from_data([6], &device);
    let float = Tensor::<B, 1>::from_data([6.0], &device);
    assert_eq!(trained(Counted::mean(net.loss(&batch), int)), expected);
    assert_eq!(trained(Counted::mean(net.loss(&batch), float)), expected);
    assert_eq!(trained(Counted::mean(net.loss(&batch), 6.0)), expected);
}

#[test]
fn sums_of_loss_sums_are_not_divided() {
    let config = AccumConfig {
        steps: 1,
        normalization: Normalization::Sum,
    };
    let net = net();
    let batch = Batch::rows(0, 6);
    let sum = windows(config).step(
        0.1,
        net.clone(),
        Counted::mean(net.loss(&batch), 6.0).backward(&net),
    );
    let mut mean = windows(AccumConfig::tokens(1));
    let mean = mean.step(
        0.6,
        net.clone(),
        Counted::mean(net.loss(&batch), 6.0).backward(&net),
    );
    assert_close(&sum, &mean, 1e-6);
}

#[test]
fn a_dropped_micro_batch_does_not_count() {
    let start = net();
    let mut net = start.clone();
    let mut with = windows(AccumConfig::tokens(2));
    let gradients = Counted::mean(net.loss(&Batch::rows(0, 3)), 3).backward(&net);
    net = with.step(0.1, net, gradients);
    let infinite = net.loss(&Batch::rows(3, 9)) * f32::INFINITY;
    let gradients = Counted::mean(infinite, 6).backward(&net);
    net = with.step(0.1, net, gradients);
    assert_eq!(with.updates().dropped(), 1);

    let mut without = windows(AccumConfig::tokens(1));
    let gradients = Counted::mean(start.loss(&Batch::rows(0, 3)), 3).backward(&start);
    assert_eq!(values(&net), values(&without.step(0.1, start, gradients)));
}

#[derive(Module, Debug)]
pub struct Slotted<B: Backend> {
    pub net: Net<B>,
    count: CountSlot<B>,
}

impl Slotted<B> {
    pub fn new() -> Self {
        Self {
            net: net(),
            count: CountSlot::new(&Default::default()),
        }
    }
}

/// A count is no gradient: it is not part of a norm, and no optimizer gets to see it.
#[test]
fn a_slot_is_not_trained() {
    let start = Slotted::new();
    let loss = start.net.loss(&Batch::rows(0, 3)) * 1e-3;
    let gradients = Counted::mean(loss, 1e6).backward(&start);
    let clip = ClipNorm::new(1e4).unwrap();
    let norm = clip.norm();
    let update = Update::new(AdamWConfig::new().init()).clip(clip).unwrap();
    let windows = Accumulation::new(AccumConfig::tokens(1)).unwrap();
    let mut optimizer = Windows::<Slotted<B>>::of(update, windows);
    let _: Slotted<B> = optimizer.step(0.1, start, gradients);
    let norm = norm.last().unwrap();
    assert!(norm < 1e5, "{norm} holds the count");
    assert_eq!(state(&optimizer.update).as_object().unwrap().len(), 4);
}

/// Burn's accumulators rebuild the gradients from the parameters of the module.
#[test]
fn a_slot_carries_the_count_through_burns_accumulator() {
    let mut model = Slotted::new();
    let start = model.clone();
    let sgd = SgdConfig::new().init::<B, Slotted<B>>();
    let mut windows = Windows::new(sgd, AccumConfig::tokens(1));
    let mut accumulator = GradientsAccumulator::new();
    for (from, to) in [(0, 5), (5, 6), (6, 12)] {
        let loss = model.net.loss(&Batch::rows(from, to));
        let gradients = Counted::mean(loss, to - from).backward(&model);
        accumulator.accumulate(&model, gradients);
    }
    model = windows.step(0.1, model, accumulator.grads());

    let mut plain = SgdConfig::new().init();
    let gradients = start.net.mean_gradients(&Batch::rows(0, 12));
    let expected = plain.step(0.1, start.net, gradients);
    assert_close(&model.net, &expected, 1e-5);

    // Without a slot the count is lost there, and that is said.
    let net = model.net;
    let mut accumulator = GradientsAccumulator::new();
    let gradients = Counted::mean(net.loss(&Batch::rows(0, 2)), 2).backward(&net);
    accumulator.accumulate(&net, gradients);
    let mut windows = self::windows(AccumConfig::tokens(1));
    let message = panic_of(|| windows.step(0.1, net.clone(), accumulator.grads()));
    assert!(message.contains("CountSlot"), "{message}");
}
