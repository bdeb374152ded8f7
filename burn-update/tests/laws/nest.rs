//! The pipeline trains bit for bit as the nest of wrappers of the same program.

use burn::optim::{GradientsParams, Optimizer};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{
    AccumConfig, Accumulation, ClipByNorm, ClipGlobalNorm, ClipNorm, Counted, MultiSteps,
    UpdateCounter, flush,
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

/// A program: the gradients of its steps, made by `backward`.
fn trains_equally<B: AutodiffBackend>(
    config: AccumConfig,
    gradients_of: impl Fn(&Net<B>, usize, &dyn Fn(usize) -> GradientsParams) -> GradientsParams,
) {
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
        let made = gradients_of(&old_model, step, &|step| {
            let loss = old_model.loss(step, step + 3);
            if config == AccumConfig::tokens(config.steps) {
                old_scaler.backward::<B, 1>(loss.clone()); // sees the loss as `Counted` shows it
                Counted::mean(loss, 3).backward(&old_model)
            } else {
                GradientsParams::from_grads(old_scaler.backward(loss), &old_model)
            }
        });
        old_model = old.step(lr, old_model, made);
        let made = gradients_of(&new_model, step, &|step| {
            let loss = new_model.loss(step, step + 3);
            if config == AccumConfig::tokens(config.steps) {
                new_scaler.backward::<B, 1>(loss.clone());
                new.backward(&new_model, Counted::mean(loss, 3))
            } else {
                new.backward(&new_model, loss)
            }
        });
        new_model = new.step(lr, new_model, made).unwrap();
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

fn with_overflows<B: AutodiffBackend>(config: AccumConfig) {
    trains_equally::<B>(config, |model, step, of_loss| {
        if overflows(step).is_empty() {
            of_loss(step)
        } else {
            gradients(model, step, overflows(step))
        }
    });
}

#[test]
fn windows_of_means_are_those_of_the_nest() {
    for steps in [1, 3] {
        with_overflows::<F32>(AccumConfig::mean(steps));
        with_overflows::<Half>(AccumConfig::mean(steps));
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
