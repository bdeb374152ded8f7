//! The state machine against PyTorch's recorded traces, DeepSpeed's algorithm and its own laws.

mod traces;

use burn_amp::{GradScalerConfig, LossScale, ScaleUpdate};
use proptest::{collection::vec, prelude::*};
use traces::traces;

#[test]
fn every_trace_of_pytorch_is_reproduced() {
    let traces = traces();
    assert_eq!(traces.len(), 5);
    for (number, case) in traces.iter().enumerate() {
        let mut scale = LossScale::new(&case.config());
        assert_eq!(case.found_inf.len(), 60);
        for (step, &found_inf) in case.found_inf.iter().enumerate() {
            scale.update(found_inf == 1);
            assert_eq!(
                scale.scale(),
                case.scale_after_update[step],
                "case {number}, step {step}"
            );
            let tracker = case.growth_tracker_after_update[step];
            assert_eq!(
                scale.growth_tracker(),
                tracker,
                "case {number}, step {step}"
            );
        }
    }
}

#[test]
fn factors_are_f64_as_in_pytorch() {
    // The product is rounded once, from f64; 9 times the f32 nearest to 0.7 would round to 6.2999997.
    let config = GradScalerConfig {
        init_scale: 9.0,
        backoff_factor: 0.7,
        ..Default::default()
    };
    let mut scale = LossScale::new(&config);
    scale.update(true);
    assert_eq!(scale.scale(), 6.3);
}

/// DeepSpeed's `DynamicLossScaler` (consecutive_hysteresis = False), line by line.
struct DeepSpeed {
    scale: f32,
    iter: i64,
    last_overflow_iter: i64,
    window: i64,
    min_scale: f32,
    delayed_shift: u32,
    hysteresis: u32,
}

impl DeepSpeed {
    /// Whether it raises.
    fn update(&mut self, overflow: bool) -> bool {
        if overflow {
            if self.delayed_shift == 1 || self.hysteresis == 1 {
                if self.scale == self.min_scale {
                    return true;
                }
                self.scale = (self.scale / 2.0).max(self.min_scale);
            } else {
                self.hysteresis -= 1;
            }
            self.last_overflow_iter = self.iter;
        } else if (self.iter - self.last_overflow_iter) % self.window == 0 {
            self.hysteresis = self.delayed_shift;
            self.scale *= 2.0;
        }
        self.iter += 1;
        false
    }
}

fn configs() -> impl Strategy<Value = GradScalerConfig> {
    (
        -20..120_i32,
        1.01..8.0_f64,
        0.01..0.99_f64,
        1..9_u32,
        1..5_u32,
        0..24_i32,
    )
        .prop_map(
            |(exponent, growth_factor, backoff_factor, growth_interval, hysteresis, below)| {
                let init_scale = 2.0_f32.powi(exponent);
                GradScalerConfig {
                    init_scale,
                    growth_factor,
                    backoff_factor,
                    growth_interval,
                    hysteresis,
                    min_scale: if below == 0 {
                        0.0
                    } else {
                        init_scale * 2.0_f32.powi(-below)
                    },
                    ..Default::default()
                }
            },
        )
}

/// Calm stretches and storms, so that both ends of the range are reached.
fn steps() -> impl Strategy<Value = Vec<bool>> {
    vec((any::<bool>(), 1..60_usize, 0..10_u8), 1..12).prop_map(|stretches| {
        let stretch = |(mostly, length, odd): (bool, usize, u8)| {
            (0..length).map(move |i| mostly != (odd > 0 && i % 10 == usize::from(odd)))
        };
        stretches.into_iter().flat_map(stretch).collect()
    })
}

proptest! {
    #[test]
    fn the_scale_stays_finite_and_above_its_floor(config in configs(), steps in steps()) {
        let mut scale = LossScale::new(&config);
        for found_inf in steps {
            scale.update(found_inf);
            prop_assert!(scale.scale().is_normal());
            prop_assert!(scale.scale() >= config.min_scale);
            prop_assert!(scale.growth_tracker() < config.growth_interval);
        }
    }

    #[test]
    fn the_update_says_what_it_did(config in configs(), steps in steps()) {
        let mut scale = LossScale::new(&config);
        for found_inf in steps {
            let before = scale.scale();
            let update = scale.update(found_inf);
            match update {
                ScaleUpdate::Grown => prop_assert!(!found_inf && scale.scale() > before),
                ScaleUpdate::BackedOff => prop_assert!(found_inf && scale.scale() < before),
                ScaleUpdate::Kept => prop_assert!(scale.scale() == before),
                ScaleUpdate::Collapsed => {
                    let floor = config.min_scale.max(f32::MIN_POSITIVE);
                    prop_assert!(found_inf && before == floor && scale.scale() == floor);
                }
            }
        }
    }

    #[test]
    fn restored_state_continues_the_trace(config in configs(), before in steps(), after in steps()) {
        let mut scale = LossScale::new(&config);
        before.into_iter().for_each(|found_inf| { scale.update(found_inf); });
        let mut restored = LossScale::new(&config);
        restored.restore(scale.state());
        for found_inf in after {
            prop_assert_eq!(scale.update(found_inf), restored.update(found_inf));
            prop_assert_eq!(&scale, &restored);
        }
    }

    #[test]
    fn hysteresis_and_minimum_are_those_of_deepspeed(
        hysteresis in 1..5_u32, window in 1..7_u32, floor in -8..1_i32, steps in steps(),
    ) {
        let config = GradScalerConfig {
            init_scale: 16.0,
            growth_interval: window,
            hysteresis,
            min_scale: 2.0_f32.powi(floor),
            ..Default::default()
        };
        let mut scale = LossScale::new(&config);
        let mut deepspeed = DeepSpeed {
            scale: 16.0,
            iter: 0,
            last_overflow_iter: -1,
            window: window.into(),
            min_scale: config.min_scale,
            delayed_shift: hysteresis,
            hysteresis,
        };
        for found_inf in steps {
            let raised = deepspeed.update(found_inf);
            prop_assert_eq!(raised, scale.update(found_inf) == ScaleUpdate::Collapsed);
            // It ends there; and DeepSpeed would grow to infinity.
            if raised || deepspeed.scale.is_infinite() {
                break;
            }
            prop_assert_eq!(scale.scale(), deepspeed.scale);
        }
    }

    #[test]
    fn a_fixed_scale_never_moves(scale in 0.001..1e6_f32, steps in steps()) {
        let mut fixed = LossScale::new(&GradScalerConfig::fixed(scale));
        for found_inf in steps {
            prop_assert_eq!(fixed.update(found_inf), ScaleUpdate::Kept);
            prop_assert_eq!(fixed.scale(), scale);
        }
    }
}

#[test]
fn a_damaged_record_gives_a_usable_scale() {
    for damaged in [f32::NAN, f32::INFINITY, 0.0, -4.0] {
        let mut scale = LossScale::new(&GradScalerConfig::default());
        let mut state = scale.state();
        state.scale = damaged;
        state.hysteresis_left = 0;
        scale.restore(state);
        assert!(scale.scale().is_normal() && scale.scale() >= 1.0);
        scale.update(true);
    }
}

#[test]
fn configurations_are_read_with_pytorchs_names_and_defaults() {
    let config: GradScalerConfig = serde_json::from_str("{}").unwrap();
    assert_eq!(config, GradScalerConfig::default());
    let text = serde_json::to_value(&config).unwrap();
    assert_eq!(
        text,
        serde_json::json!({
            "init_scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000,
            "enabled": true, "hysteresis": 1, "min_scale": 1.0, "dynamic": true,
        })
    );
    let error = serde_json::from_str::<GradScalerConfig>(r#"{"growth_intervall": 5}"#).unwrap_err();
    assert!(error.to_string().contains("growth_intervall"), "{error}");
}

#[test]
fn configurations_that_cannot_work_are_refused_by_field_and_value() {
    let default = GradScalerConfig::default;
    let cases = [
        (
            GradScalerConfig {
                init_scale: 0.0,
                ..default()
            },
            "init_scale = 0",
        ),
        (
            GradScalerConfig {
                init_scale: f32::INFINITY,
                ..default()
            },
            "init_scale = inf",
        ),
        (
            GradScalerConfig {
                init_scale: f32::NAN,
                ..default()
            },
            "init_scale = NaN",
        ),
        (
            GradScalerConfig {
                growth_factor: 1.0,
                ..default()
            },
            "growth_factor = 1",
        ),
        (
            GradScalerConfig {
                backoff_factor: 1.0,
                ..default()
            },
            "backoff_factor = 1",
        ),
        (
            GradScalerConfig {
                backoff_factor: 0.0,
                ..default()
            },
            "backoff_factor = 0",
        ),
        (
            GradScalerConfig {
                growth_interval: 0,
                ..default()
            },
            "growth_interval = 0",
        ),
        (
            GradScalerConfig {
                hysteresis: 0,
                ..default()
            },
            "hysteresis = 0",
        ),
        (
            GradScalerConfig {
                min_scale: -1.0,
                ..default()
            },
            "min_scale = -1",
        ),
        (
            GradScalerConfig {
                init_scale: 0.5,
                ..default()
            },
            "min_scale = 1",
        ),
    ];
    for (config, named) in cases {
        let message = config.validate().unwrap_err().to_string();
        assert!(message.contains(named), "{message}");
    }
    assert!(GradScalerConfig::fixed(0.5).validate().is_ok());
}
