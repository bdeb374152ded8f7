//! Law: within a window only the device knows what has overflowed, and the host asks at its end.
//! That it asks earlier, for a record, a clone or an accessor, changes nothing.

use burn::optim::{AdamConfig, AdamWConfig, Optimizer, SgdConfig, momentum::MomentumConfig};
use burn_accum::AccumConfig;
use burn_amp::{GradScaler, GradScalerConfig, Overflow};
use burn_update::Update;
use proptest::{collection::vec, prelude::*};

use crate::support::{B, Net, Windows, gradients, json, net, values};

/// What happens at one micro-batch.
#[derive(Clone, Debug)]
struct Micro {
    /// Indices of the parameters whose gradients are non-finite.
    overflowing: Vec<usize>,
    then: Then,
}

/// What happens after a micro-batch.
#[derive(Clone, Copy, Debug)]
enum Then {
    Nothing,
    /// Save a record and go on.
    Save,
    /// Save a record, forget everything, and go on from the record.
    Resume,
    /// Go on with a clone.
    Clone,
}

/// Everything that training leaves behind.
#[derive(Debug, PartialEq)]
struct Outcome {
    parameters_after_each_step: Vec<Vec<Vec<u32>>>,
    records: Vec<serde_json::Value>,
    last_record: serde_json::Value,
    scale: f32,
    growth_tracker: u32,
    steps: u64,
    skipped: u64,
    last_overflow: Option<Overflow>,
}

/// Trains in windows of this length; the host `asks` after each micro-batch, or not.
fn train<O: Optimizer<Net<B>, B> + 'static>(
    optimizer: &O,
    mut net: Net<B>,
    micros: &[Micro],
    window: usize,
    asks: bool,
) -> Outcome {
    let config = GradScalerConfig {
        growth_interval: 3,
        hysteresis: 2,
        ..Default::default()
    };
    let new = || {
        let scaler = GradScaler::new(&config).unwrap();
        let windows = Windows::new(optimizer.clone(), AccumConfig::mean(window));
        (windows.scaled(&scaler), scaler)
    };
    let (mut windows, mut scaler) = new();
    let mut parameters_after_each_step = Vec::new();
    let mut records = Vec::new();
    for (number, Micro { overflowing, then }) in micros.iter().enumerate() {
        let lr = 0.1 / (number + 1) as f64;
        let gradients = gradients(&net, number, overflowing, &[]);
        net = windows.step(lr, net, gradients);
        if asks {
            scaler.scale();
        }
        parameters_after_each_step.push(values(&net));
        match then {
            Then::Nothing => {}
            Then::Clone => windows = windows.clone(),
            Then::Save => records.push(json(windows.update.record())),
            Then::Resume => {
                let record = windows.update.record();
                (windows, scaler) = new();
                windows = windows.load(record);
            }
        }
    }
    Outcome {
        parameters_after_each_step,
        records,
        last_record: json(windows.update.record()),
        scale: scaler.scale(),
        growth_tracker: scaler.growth_tracker(),
        steps: scaler.steps(),
        skipped: scaler.skipped_steps(),
        last_overflow: scaler.last_overflow(),
    }
}

fn late_is_at_once<O: Optimizer<Net<B>, B> + 'static>(
    optimizer: O,
    micros: &[Micro],
    window: usize,
) {
    let net = net();
    let at_once = train(&optimizer, net.clone(), micros, window, true);
    let late = train(&optimizer, net, micros, window, false);
    assert_eq!(at_once, late);
}

fn sgd() -> impl Optimizer<Net<B>, B> {
    let momentum = MomentumConfig::new().with_momentum(0.9).with_nesterov(true);
    SgdConfig::new().with_momentum(Some(momentum)).init()
}

fn adam() -> impl Optimizer<Net<B>, B> {
    AdamConfig::new().init()
}

fn adamw() -> impl Optimizer<Net<B>, B> {
    let config = AdamWConfig::new().with_weight_decay(0.1);
    config.with_amsgrad(true).init()
}

fn micros() -> impl Strategy<Value = Vec<Micro>> {
    let overflowing = prop_oneof![3 => Just(Vec::new()), 2 => vec(0..4_usize, 1..4)];
    let then = prop_oneof![
        6 => Just(Then::Nothing),
        1 => Just(Then::Save),
        1 => Just(Then::Resume),
        1 => Just(Then::Clone),
    ];
    let micro = (overflowing, then).prop_map(|(overflowing, then)| Micro { overflowing, then });
    vec(micro, 1..16)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..Default::default() })]

    #[test]
    fn with_sgd_momentum(micros in micros(), window in 1..5_usize) {
        late_is_at_once(sgd(), &micros, window);
    }

    #[test]
    fn with_adam(micros in micros(), window in 1..5_usize) {
        late_is_at_once(adam(), &micros, window);
    }

    #[test]
    fn with_adamw(micros in micros(), window in 1..5_usize) {
        late_is_at_once(adamw(), &micros, window);
    }
}

/// The places where an off-by-one would show, each after two finite micro-batches.
#[test]
fn with_the_overflow_at_the_edges() {
    let finite = |then| Micro {
        overflowing: vec![],
        then,
    };
    let overflow = |then| Micro {
        overflowing: vec![1, 3],
        then,
    };
    let endings: [&[Micro]; 5] = [
        &[overflow(Then::Nothing)],
        &[overflow(Then::Nothing), overflow(Then::Nothing)],
        &[overflow(Then::Save), finite(Then::Nothing)],
        &[overflow(Then::Resume), finite(Then::Save)],
        &[finite(Then::Resume), overflow(Then::Save)],
    ];
    for ending in endings {
        let start = [finite(Then::Nothing), finite(Then::Nothing)];
        let micros: Vec<Micro> = start.iter().chain(ending).cloned().collect();
        for window in 1..5 {
            late_is_at_once(adam(), &micros, window);
            late_is_at_once(sgd(), &micros, window);
            late_is_at_once(adamw(), &micros, window);
        }
    }
}

/// The update of an optimizer alone has no windows, and its scale is asked in each step.
#[test]
fn windows_of_one_are_steps() {
    let scaled = |update: Update<Net<B>, B>| {
        let scaler = GradScaler::default();
        (update.scale(scaler.clone()).unwrap(), scaler)
    };
    let (mut steps, scaler) = scaled(Update::new(adamw()));
    let windows = Update::new(adamw()).accumulate(AccumConfig::mean(1));
    let (mut windows, of_windows) = scaled(windows.unwrap());
    let mut net = net();
    for step in 0..9 {
        let overflowing: &[usize] = if step % 4 == 2 { &[2] } else { &[] };
        let gradients = || gradients(&net, step, overflowing, &[]);
        let expected = steps.step(0.1, net.clone(), gradients()).unwrap();
        let found = windows.step(0.1, net.clone(), gradients()).unwrap();
        assert_eq!(values(&found), values(&expected), "step {step}");
        assert_eq!(of_windows.scale(), scaler.scale());
        net = expected;
    }
    assert_eq!(of_windows.skipped_steps(), 2);
}
