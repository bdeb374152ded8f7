//! The laws of the host optimizer: PyTorch's numbers, and the same bits whatever the threads, the
//! ranges and the dtypes.

mod golden;

use burn_zero::{AdamWState, Gradients, HostAdamW, HostAdamWConfig, ParamsOut, ZeroError};
use half::{bf16, f16};

/// More than two chunks, and no multiple of a block or a vector.
const LEN: usize = 3 * 64 * 1024 - 1021;

/// Numbers of all signs and of magnitudes from 2^-20 to 2^3, the same on every machine.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    (0..len)
        .map(|_| {
            let bits = next();
            let unit = (bits >> 40) as f32 / (1u64 << 24) as f32 * 2.0 - 1.0;
            unit * 2f32.powi((bits % 24) as i32 - 20)
        })
        .collect()
}

fn config() -> HostAdamWConfig {
    HostAdamWConfig {
        weight_decay: 0.1,
        ..Default::default()
    }
}

fn bits(slice: &[f32]) -> Vec<u32> {
    slice.iter().map(|value| value.to_bits()).collect()
}

#[track_caller]
fn assert_same_bits(left: &HostAdamW, right: &HostAdamW) {
    assert_eq!(left.steps(), right.steps());
    assert!(bits(left.master()) == bits(right.master()), "master");
    assert!(
        bits(left.moments().0) == bits(right.moments().0),
        "first moment"
    );
    assert!(
        bits(left.moments().1) == bits(right.moments().1),
        "second moment"
    );
}

/// Four steps in f32.
fn run(mut adamw: HostAdamW) -> HostAdamW {
    for step in 0..4 {
        let gradients = values(100 + step, adamw.len());
        adamw.step(1e-2, Gradients::F32(&gradients), None).unwrap();
    }
    adamw
}

#[track_caller]
fn assert_close(actual: &[f32], expected: &[f32], what: &str) {
    assert_eq!(actual.len(), expected.len());
    for (index, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        // A few roundings of f32 a step, of values around 1.
        let tolerance = 4.0 * f32::EPSILON * expected.abs().max(0.25);
        assert!(
            (actual - expected).abs() <= tolerance,
            "{what}[{index}]: {actual} instead of {expected}"
        );
    }
}

#[test]
fn numbers_are_those_of_pytorch() {
    let cases = golden::cases();
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let config = HostAdamWConfig {
            beta_1: case.beta1,
            beta_2: case.beta2,
            epsilon: case.eps,
            weight_decay: case.weight_decay,
        };
        let mut adamw = HostAdamW::new(config, &case.initial).unwrap();
        for (gradients, expected) in case.grads.iter().zip(&case.params_after_step) {
            adamw
                .step(case.lr, Gradients::F32(gradients), None)
                .unwrap();
            assert_close(adamw.master(), expected, "parameters");
        }
        assert_eq!(adamw.steps(), 12);
        assert_close(adamw.moments().0, &case.exp_avg_last, "first moment");
        assert_close(adamw.moments().1, &case.exp_avg_sq_last, "second moment");
    }
}

#[test]
fn threads_change_no_bit() {
    let expected = run(HostAdamW::new(config(), &values(1, LEN)).unwrap());
    for threads in [1, 2, 5] {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .build()
            .unwrap();
        let adamw = pool.install(|| run(HostAdamW::new(config(), &values(1, LEN)).unwrap()));
        assert_same_bits(&adamw, &expected);
    }
}

#[test]
fn low_precision_is_widened_exactly_and_rounded_to_nearest_even() {
    let wide = values(7, LEN);
    let brain: Vec<bf16> = wide.iter().copied().map(bf16::from_f32).collect();
    let half: Vec<f16> = wide.iter().copied().map(f16::from_f32).collect();
    let widened_brain: Vec<f32> = brain.iter().copied().map(f32::from).collect();
    let widened_half: Vec<f32> = half.iter().copied().map(f32::from).collect();
    let pairs = [
        (Gradients::Bf16(&brain), &widened_brain),
        (Gradients::F16(&half), &widened_half),
    ];
    for (low, widened) in pairs {
        let new = || HostAdamW::new(config(), &values(1, LEN)).unwrap();
        let mut expected = new();
        expected.step(1e-2, Gradients::F32(widened), None).unwrap();

        let mut adamw = new();
        let mut out = vec![bf16::ZERO; LEN];
        adamw
            .step(1e-2, low, Some(ParamsOut::Bf16(&mut out)))
            .unwrap();
        assert_same_bits(&adamw, &expected);
        let rounded = adamw.master().iter().copied().map(bf16::from_f32);
        assert!(
            out.iter()
                .map(|low| low.to_bits())
                .eq(rounded.map(bf16::to_bits))
        );

        let mut adamw = new();
        let mut out = vec![f16::ZERO; LEN];
        adamw
            .step(1e-2, low, Some(ParamsOut::F16(&mut out)))
            .unwrap();
        let rounded = adamw.master().iter().copied().map(f16::from_f32_const);
        assert!(
            out.iter()
                .map(|low| low.to_bits())
                .eq(rounded.map(f16::to_bits))
        );
    }
}

#[test]
fn rounding_covers_ties_subnormals_and_what_is_not_finite() {
    // Learning rate 0: the parameters come out as they are, rounded.
    let special: Vec<f32> = [
        0x3f80_8000,
        0x3f81_8000,
        0x3f80_8001,
        0x3f80_7fff,
        0x7f7f_ffff,
        0xff7f_ffff,
        0x7f80_0000,
        0xff80_0000,
        0x7fc0_0000,
        0x0000_0001,
        0x8000_0001,
        0x0000_8000,
        0x0001_8000,
        0x3300_0000,
        0x3300_0001,
        0x387f_e000,
        0x477f_efff,
        0x477f_f000,
        0x3f80_1000,
        0x3f80_3000,
        0x0000_0000,
        0x8000_0000,
    ]
    .map(f32::from_bits)
    .to_vec();
    let zeros = vec![0.0; special.len()];
    let mut adamw = HostAdamW::new(config(), &special).unwrap();
    let mut brain = vec![bf16::ZERO; special.len()];
    let out = ParamsOut::Bf16(&mut brain);
    adamw.step(0.0, Gradients::F32(&zeros), Some(out)).unwrap();
    let mut half = vec![f16::ZERO; special.len()];
    let out = ParamsOut::F16(&mut half);
    adamw.step(0.0, Gradients::F32(&zeros), Some(out)).unwrap();
    for (index, value) in adamw.master().iter().copied().enumerate() {
        assert_eq!(
            brain[index].to_bits(),
            bf16::from_f32(value).to_bits(),
            "{value:e}"
        );
        assert_eq!(
            half[index].to_bits(),
            f16::from_f32_const(value).to_bits(),
            "{value:e}"
        );
    }
    assert_eq!(
        brain[..4]
            .iter()
            .map(|low| low.to_bits())
            .collect::<Vec<_>>(),
        [0x3f80, 0x3f82, 0x3f81, 0x3f80]
    );
}

/// In f64, without any fusing.
fn reference(
    config: &HostAdamWConfig,
    learning_rate: f64,
    gradients: &[Vec<f32>],
    initial: &[f32],
) -> Vec<f64> {
    let mut master: Vec<f64> = initial.iter().map(|&value| value.into()).collect();
    let (mut first, mut second) = (vec![0.0; master.len()], vec![0.0; master.len()]);
    for (step, gradients) in gradients.iter().enumerate() {
        let correct = |beta: f64| 1.0 - beta.powi(step as i32 + 1);
        for (index, gradient) in gradients.iter().enumerate() {
            let gradient = f64::from(*gradient);
            first[index] = config.beta_1 * first[index] + (1.0 - config.beta_1) * gradient;
            second[index] =
                config.beta_2 * second[index] + (1.0 - config.beta_2) * gradient * gradient;
            master[index] -= learning_rate * config.weight_decay * master[index];
            let root = (second[index] / correct(config.beta_2)).sqrt() + config.epsilon;
            master[index] -= learning_rate * first[index] / correct(config.beta_1) / root;
        }
    }
    master
}

#[test]
fn the_algorithm_is_that_of_the_paper() {
    let initial = values(1, 4099);
    let gradients: Vec<Vec<f32>> = (0..8).map(|step| values(20 + step, 4099)).collect();
    let config = HostAdamWConfig {
        weight_decay: 0.5,
        ..config()
    };
    let mut adamw = HostAdamW::new(config.clone(), &initial).unwrap();
    for gradients in &gradients {
        adamw.step(0.02, Gradients::F32(gradients), None).unwrap();
    }
    let expected = reference(&config, 0.02, &gradients, &initial);
    for (actual, expected) in adamw.master().iter().zip(&expected) {
        assert!(
            (f64::from(*actual) - expected).abs() <= 2e-6 * expected.abs().max(0.1),
            "{actual} {expected}"
        );
    }
}

#[test]
fn a_loaded_state_goes_on_bit_for_bit() {
    let mut straight = run(HostAdamW::new(config(), &values(1, LEN)).unwrap());
    let mut resumed = HostAdamW::from_state(config(), straight.state()).unwrap();
    assert_same_bits(&resumed, &straight);
    for adamw in [&mut straight, &mut resumed] {
        adamw
            .step(1e-2, Gradients::F32(&values(55, LEN)), None)
            .unwrap();
    }
    assert_same_bits(&resumed, &straight);
}

#[test]
fn an_empty_shard_counts_its_steps() {
    let mut adamw = HostAdamW::new(config(), &[]).unwrap();
    assert!(adamw.is_empty());
    adamw.step(1e-2, Gradients::F32(&[]), None).unwrap();
    assert_eq!(adamw.steps(), 1);
}

#[test]
fn what_cannot_be_is_refused_before_anything_changes() {
    let before = run(HostAdamW::new(config(), &values(1, 10)).unwrap());
    let mut adamw = HostAdamW::from_state(config(), before.state()).unwrap();
    let ten = values(5, 10);

    let error = adamw
        .step(1e-2, Gradients::F32(&ten[..9]), None)
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "HostAdamW, gradients: the buffer has 9 elements, but 10 are needed"
    );
    let mut short = [bf16::ZERO; 9];
    let out = ParamsOut::Bf16(&mut short);
    let error = adamw
        .step(1e-2, Gradients::F32(&ten), Some(out))
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "HostAdamW, the low-precision parameters: the buffer has 9 elements, but 10 are needed"
    );
    for wrong in [f64::NAN, -1.0, f64::INFINITY] {
        let error = adamw.step(wrong, Gradients::F32(&ten), None).unwrap_err();
        assert!(matches!(error, ZeroError::InvalidSetting(_)));
    }
    assert_same_bits(&adamw, &before);

    for wrong in [
        HostAdamWConfig {
            beta_1: 1.0,
            ..config()
        },
        HostAdamWConfig {
            beta_2: -0.1,
            ..config()
        },
        HostAdamWConfig {
            epsilon: f64::NAN,
            ..config()
        },
        HostAdamWConfig {
            weight_decay: -1.0,
            ..config()
        },
    ] {
        let error = HostAdamW::new(wrong, &ten).unwrap_err();
        assert!(matches!(error, ZeroError::InvalidSetting(_)));
    }
    let state = AdamWState {
        moment_2: &ten[..3],
        ..before.state()
    };
    let error = HostAdamW::from_state(config(), state).unwrap_err();
    assert_eq!(
        error.to_string(),
        "HostAdamW, the second moment: the buffer has 3 elements, but 10 are needed"
    );
}

#[test]
fn a_configuration_is_read_from_a_file_and_amsgrad_is_refused() {
    let read = |text: &str| serde_json::from_str::<HostAdamWConfig>(text);
    let config = read(r#"{"beta_1": 0.8}"#).unwrap();
    assert_eq!(config.beta_1, 0.8);
    assert_eq!(config.beta_2, 0.999);
    assert_eq!(
        read(&serde_json::to_string(&config).unwrap()).unwrap(),
        config
    );
    assert!(
        read(r#"{"amsgrad": true}"#)
            .unwrap_err()
            .to_string()
            .contains("amsgrad")
    );
}

#[test]
fn burns_configuration_keeps_its_values_or_says_what_there_is_not() {
    use burn::grad_clipping::GradientClippingConfig;
    use burn::optim::AdamWConfig;

    let config = AdamWConfig::new().with_beta_2(0.98).with_epsilon(1e-6);
    let expected = HostAdamWConfig {
        beta_1: 0.9,
        beta_2: 0.98,
        epsilon: 1e-6,
        weight_decay: 1e-4,
    };
    assert_eq!(HostAdamWConfig::try_from(config), Ok(expected));
    for (refused, setting) in [
        (AdamWConfig::new().with_amsgrad(true), "amsgrad"),
        (
            AdamWConfig::new().with_cautious_weight_decay(true),
            "cautious_weight_decay",
        ),
        (
            AdamWConfig::new().with_grad_clipping(Some(GradientClippingConfig::Norm(1.0))),
            "grad_clipping",
        ),
    ] {
        let error = HostAdamWConfig::try_from(refused).expect_err("not on the host");
        assert!(
            matches!(&error, ZeroError::InvalidSetting(found) if found.setting == setting),
            "{error}"
        );
    }
}
