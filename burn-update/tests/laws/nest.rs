//! The pipeline trains bit for bit as the nest of wrappers of the same program.

use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{
    AccumConfig, Accumulation, ClipByNorm, ClipGlobalNorm, ClipNorm, Counted, MultiSteps,
    Normalization, UpdateCounter, flush,
};
use burn_amp::{GradScaler, GradScalerConfig};
use burn_update::Update;

use crate::support::{F32, Half, LR, Net, adamw, bits, gradients, net};

const MAX_NORM: f32 = 0.4;

fn scaler() -> GradScaler {
    let config = GradScalerConfig {
        growth_interval: 3,
        ..Default::default()
    };
    GradScaler::new(config).unwrap()
}

/// What the handles say.
fn progress(scaler: &GradScaler, counter: &UpdateCounter) -> [u64; 8] {
    [
        u64::from(scaler.scale().to_bits()),
        scaler.growth_tracker().into(),
        scaler.steps(),
        scaler.skipped_steps(),
        counter.updates(),
        counter.micro_batches(),
        counter.micro_step(),
        counter.dropped(),
    ]
}

fn windows_are_equal<B: AutodiffBackend>(config: AccumConfig) {
    let (old_scaler, new_scaler) = (scaler(), scaler());
    let clip = ClipGlobalNorm::new(adamw::<B>(), MAX_NORM).unwrap();
    let old_norm = clip.norm();
    let windows = MultiSteps::new(clip, config).unwrap();
    let old_counter = windows.updates();
    let mut old = old_scaler.wrap(windows);

    let clip = ClipNorm::new(MAX_NORM).unwrap();
    let new_norm = clip.norm();
    let windows = Accumulation::new(config).unwrap();
    let new_counter = windows.updates();
    let mut new = Update::new(adamw::<B>())
        .clip(clip)
        .unwrap()
        .accumulate(windows)
        .unwrap()
        .scale(new_scaler.clone())
        .unwrap();

    let start = net::<B>();
    let (mut old_model, mut new_model) = (start.clone(), start);
    for step in 0..40 {
        let lr = LR / (step + 1) as f64;
        let items = 2 + step % 3;
        let counts = config.normalization == Normalization::Tokens;
        if !overflows(step).is_empty() && !counts {
            let made_up = gradients(&old_model, step, overflows(step));
            old_model = old.step(lr, old_model, made_up);
            let made_up = gradients(&new_model, step, overflows(step));
            new_model = new.step(lr, new_model, made_up).unwrap();
        } else if counts {
            // The scale is in no bit of f32 gradients, but an infinite loss is in all.
            let counted = |model: &Net<B>| {
                let infinite = if overflows(step).is_empty() {
                    1.0
                } else {
                    f32::INFINITY
                };
                Counted::mean(model.loss(step, step + items) * infinite, items)
            };
            let of_old = || counted(&old_model).backward(&old_model);
            old_model = old.step(lr, old_model.clone(), GradScaler::unscaled(of_old));
            let of_new = || counted(&new_model).backward(&new_model);
            let made = GradScaler::unscaled(of_new);
            new_model = new.step(lr, new_model, made).unwrap();
        } else {
            let made = old_scaler.backward(old_model.loss(step, step + items));
            let made = GradientsParams::from_grads(made, &old_model);
            old_model = old.step(lr, old_model, made);
            let made = new.backward(&new_model, new_model.loss(step, step + items));
            new_model = new.step(lr, new_model, made).unwrap();
        }
        if step % 11 == 10 {
            old_model = flush(|nothing| old.step(lr, old_model, nothing));
            new_model = new.flush(lr, new_model).unwrap();
        }
        assert_eq!(bits(&old_model), bits(&new_model), "step {step}");
        assert_eq!(
            progress(&old_scaler, &old_counter),
            progress(&new_scaler, &new_counter),
            "step {step}"
        );
        let bits_of = |norm: Option<f32>| norm.map(f32::to_bits);
        assert_eq!(
            bits_of(old_norm.last()),
            bits_of(new_norm.last()),
            "step {step}"
        );
    }
    assert_eq!(new.updates(), new_counter.updates());
    assert!(new.updates() >= 8 && old_scaler.skipped_steps() >= 4);
}

/// Which parameter's gradient is not finite in a step.
fn overflows(step: usize) -> &'static [usize] {
    match step % 9 {
        4 => &[1],
        6 if step > 20 => &[0, 3],
        _ => &[],
    }
}

#[test]
fn windows_are_those_of_the_nest() {
    for steps in [1, 3] {
        for config in [AccumConfig::mean(steps), AccumConfig::tokens(steps)] {
            windows_are_equal::<F32>(config);
            windows_are_equal::<Half>(config);
        }
    }
}

/// The loss scale, clipping and AdamW without a window.
fn without_windows<B: AutodiffBackend>() {
    let (old_scaler, new_scaler) = (scaler(), scaler());
    let clip = ClipGlobalNorm::new(adamw::<B>(), MAX_NORM).unwrap();
    let mut old = old_scaler.wrap(clip);
    let mut new = Update::new(adamw::<B>())
        .clip_norm(MAX_NORM)
        .unwrap()
        .scale(new_scaler.clone())
        .unwrap();
    let start = net::<B>();
    let (mut old_model, mut new_model) = (start.clone(), start);
    for step in 0..30 {
        let bad = overflows(step);
        if bad.is_empty() {
            let gradients = old_scaler.backward(old_model.loss(step, step + 3));
            let gradients = GradientsParams::from_grads(gradients, &old_model);
            old_model = old.step(LR, old_model, gradients);
            let gradients = new.backward(&new_model, new_model.loss(step, step + 3));
            new_model = new.step(LR, new_model, gradients).unwrap();
        } else {
            let made_up = gradients(&old_model, step, bad);
            old_model = old.step(LR, old_model, made_up);
            let made_up = gradients(&new_model, step, bad);
            new_model = new.step(LR, new_model, made_up).unwrap();
        }
        assert_eq!(bits(&old_model), bits(&new_model), "step {step}");
        let of = |scaler: &GradScaler| (scaler.scale(), scaler.growth_tracker(), scaler.steps());
        assert_eq!(of(&old_scaler), of(&new_scaler), "step {step}");
        assert_eq!(old_scaler.last_overflow(), new_scaler.last_overflow());
    }
    assert!(old_scaler.skipped_steps() >= 3);
}

#[test]
fn scaled_and_clipped_steps_are_those_of_the_nest() {
    without_windows::<F32>();
    without_windows::<Half>();
}

#[test]
fn an_update_of_an_optimizer_alone_is_that_optimizer() {
    let mut update = Update::new(adamw::<F32>());
    let mut optimizer = adamw::<F32>();
    let start = net::<F32>();
    let (mut model, mut expected) = (start.clone(), start);
    for step in 0..5 {
        let gradients = update.backward(&model, model.loss(step, step + 3));
        model = update.step(LR, model, gradients).unwrap();
        let gradients = expected.loss(step, step + 3).backward();
        let gradients = GradientsParams::from_grads(gradients, &expected);
        expected = optimizer.step(LR, expected, gradients);
        assert_eq!(bits(&model), bits(&expected));
    }
}
