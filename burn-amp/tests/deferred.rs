//! Deferred detection gives what synchronous detection gives, bit for bit, whatever overflows and
//! whenever it is saved.

mod support;

use burn::{
    grad_clipping::GradientClippingConfig,
    optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig, momentum::MomentumConfig},
};
use burn_amp::{Detection, GradScaler, GradScalerConfig, Overflow};
use proptest::{collection::vec, prelude::*};
use support::{B, Net, gradients, json, net, state_of, values};

/// What happens at one step.
#[derive(Clone, Debug)]
struct Step {
    /// Indices of the parameters whose gradients are non-finite.
    overflowing: Vec<usize>,
    then: Then,
}

/// What happens after a step.
#[derive(Clone, Copy, Debug)]
enum Then {
    Nothing,
    /// Save a record and go on.
    Save,
    /// Save a record, forget everything, and go on from the record.
    Resume,
    /// Go on with a clone.
    Clone,
    /// Ask for the scale.
    Ask,
}

/// Everything that training leaves behind.
#[derive(Debug, PartialEq)]
struct Outcome {
    parameters_after_each_step: Vec<Vec<Vec<u32>>>,
    records: Vec<serde_json::Value>,
    moments: serde_json::Value,
    scale: f32,
    growth_tracker: u32,
    steps: u64,
    skipped: u64,
    last_overflow: Option<Overflow>,
}

fn train<O: Optimizer<Net<B>, B> + 'static>(
    optimizer: &O,
    mut net: Net<B>,
    steps: &[Step],
    detection: Detection,
) -> Outcome {
    let config = GradScalerConfig {
        growth_interval: 3,
        hysteresis: 2,
        ..Default::default()
    };
    let new_scaler = || GradScaler::new(&config).unwrap().with_detection(detection);
    let mut scaler = new_scaler();
    let mut scaled = scaler.wrap(optimizer.clone());
    let mut parameters_after_each_step = Vec::new();
    let mut records = Vec::new();

    for (number, Step { overflowing, then }) in steps.iter().enumerate() {
        let lr = 0.1 / (number + 1) as f64;
        net = scaled.step(lr, net.clone(), gradients(&net, number, overflowing));
        parameters_after_each_step.push(values(&net));
        match then {
            Then::Nothing => {}
            Then::Ask => drop(scaler.scale()),
            Then::Clone => scaled = scaled.clone(),
            Then::Save => records.push(json(scaled.to_record())),
            Then::Resume => {
                let record = scaled.to_record();
                scaler = new_scaler();
                scaled = scaler.wrap(optimizer.clone()).load_record(record);
            }
        }
    }
    Outcome {
        parameters_after_each_step,
        records,
        moments: state_of(scaled.inner()),
        scale: scaler.scale(),
        growth_tracker: scaler.growth_tracker(),
        steps: scaler.steps(),
        skipped: scaler.skipped_steps(),
        last_overflow: scaler.last_overflow(),
    }
}

fn deferred_is_sync<O: Optimizer<Net<B>, B> + 'static>(optimizer: O, steps: &[Step]) {
    let net = net();
    let sync = train(&optimizer, net.clone(), steps, Detection::Sync);
    let deferred = train(&optimizer, net, steps, Detection::Deferred);
    assert_eq!(sync, deferred);
}

fn sgd() -> impl Optimizer<Net<B>, B> {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_nesterov(true);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn adam() -> impl Optimizer<Net<B>, B> {
    AdamConfig::new().init()
}

fn adamw() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new()
        .with_weight_decay(0.1)
        .with_amsgrad(true)
        .init()
}

fn clipped_adamw() -> impl Optimizer<Net<B>, B> {
    AdamWConfig::new()
        .init::<B, Net<B>>()
        .with_grad_clipping(GradientClippingConfig::Norm(0.5).init())
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let overflowing = prop_oneof![3 => Just(Vec::new()), 2 => vec(0..6_usize, 1..4)];
    let then = prop_oneof![
        6 => Just(Then::Nothing),
        1 => Just(Then::Save),
        1 => Just(Then::Resume),
        1 => Just(Then::Clone),
        1 => Just(Then::Ask),
    ];
    vec(
        (overflowing, then).prop_map(|(overflowing, then)| Step { overflowing, then }),
        1..16,
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn with_sgd_momentum(steps in steps()) {
        deferred_is_sync(sgd(), &steps);
    }

    #[test]
    fn with_adam(steps in steps()) {
        deferred_is_sync(adam(), &steps);
    }

    #[test]
    fn with_adamw(steps in steps()) {
        deferred_is_sync(adamw(), &steps);
    }

    #[test]
    fn with_clipping_inside(steps in steps()) {
        deferred_is_sync(clipped_adamw(), &steps);
    }
}

/// The places where an off-by-one would show, each after two finite steps.
#[test]
fn with_the_overflow_at_the_edges() {
    let finite = |then| Step {
        overflowing: vec![],
        then,
    };
    let overflow = |then| Step {
        overflowing: vec![1, 5],
        then,
    };
    let endings: [&[Step]; 5] = [
        &[overflow(Then::Nothing)],
        &[overflow(Then::Nothing), overflow(Then::Nothing)],
        &[overflow(Then::Save), finite(Then::Nothing)],
        &[overflow(Then::Resume), finite(Then::Save)],
        &[finite(Then::Resume), overflow(Then::Save)],
    ];
    for ending in endings {
        let start = [finite(Then::Nothing), finite(Then::Nothing)];
        let steps: Vec<Step> = start.iter().chain(ending).cloned().collect();
        deferred_is_sync(adam(), &steps);
        deferred_is_sync(sgd(), &steps);
        deferred_is_sync(adamw(), &steps);
    }
}
