//! DeepSpeed's schedules, update by update.

use examples::gpt::scheduler::{SchedulerConfig, Warmup, WarmupShape};

#[track_caller]
fn close(actual: f64, expected: f64) {
    assert!(
        (actual - expected).abs() < 1e-12,
        "{actual} instead of {expected}"
    );
}

const LINEAR: Warmup = Warmup {
    steps: 4,
    shape: WarmupShape::Linear,
};

#[test]
fn warm_up_rises_to_the_optimizers_rate_and_stays() {
    let warmup = SchedulerConfig::WarmupLR {
        warmup: LINEAR,
        min_lr: 0.0,
        max_lr: None,
    };
    let rates: Vec<f64> = (0..7).map(|update| warmup.lr(update, 0.8)).collect();
    assert_eq!(rates, [0.0, 0.0, 0.2, 0.4, 0.6000000000000001, 0.8, 0.8]);

    let log = Warmup {
        steps: 8,
        shape: WarmupShape::Log,
    };
    let warmup = SchedulerConfig::WarmupLR {
        warmup: log,
        min_lr: 0.1,
        max_lr: Some(1.1),
    };
    close(warmup.lr(0, 5.0), 0.1);
    close(warmup.lr(1, 5.0), 0.1);
    close(warmup.lr(2, 5.0), 0.1 + 1.0 / 3.0);
    close(warmup.lr(4, 5.0), 0.1 + 2.0 / 3.0);
    close(warmup.lr(8, 5.0), 1.1);
}

#[test]
fn decay_ends_at_zero() {
    let decay = SchedulerConfig::WarmupDecayLR {
        warmup: LINEAR,
        min_lr: 0.0,
        max_lr: 1.0,
        total_steps: 8,
    };
    close(decay.lr(3, 9.0), 0.5);
    close(decay.lr(5, 9.0), 1.0);
    close(decay.lr(8, 9.0), 0.25);
    close(decay.lr(9, 9.0), 0.0);
    close(decay.lr(101, 9.0), 0.0);
}

#[test]
fn cosine_ends_at_its_floor_and_stays() {
    let cosine = SchedulerConfig::WarmupCosineLR {
        warmup: LINEAR,
        min_ratio: 0.5,
        end_ratio: 0.1,
        total_steps: 8,
    };
    close(cosine.lr(0, 2.0), 0.0);
    close(cosine.lr(1, 2.0), 1.0);
    close(cosine.lr(3, 2.0), 1.5);
    close(cosine.lr(6, 2.0), 2.0 * (0.1 + 0.9 * 0.5));
    close(cosine.lr(8, 2.0), 0.2);
    close(cosine.lr(1001, 2.0), 0.2);
    let none_left = SchedulerConfig::WarmupCosineLR {
        warmup: LINEAR,
        min_ratio: 0.0,
        end_ratio: 0.1,
        total_steps: 2,
    };
    close(none_left.lr(5, 2.0), 0.2);
}
