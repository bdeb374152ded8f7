//! The order of the parts, and parts of one's own.

use burn::module::AutodiffModule;
use burn::optim::{GradientsParams, Optimizer, SgdConfig};
use burn::tensor::backend::AutodiffBackend;
use burn_accum::{AccumConfig, ClipByNorm, ClipNorm};
use burn_amp::GradScalerConfig;
use burn_update::{Part, Stateful, Step, Update, UpdateError, map_gradients};

use crate::support::{F32, LR, Net, PATHS, Spy, adamw, bits, gradients, net};

/// Multiplies the gradients, and counts its updates.
#[derive(Clone)]
struct Times {
    factor: f64,
    paths: Vec<String>,
}

impl<B: AutodiffBackend> Stateful<B> for Times {
    fn name(&self) -> String {
        "times".to_owned()
    }
}

impl<M: AutodiffModule<B>, B: AutodiffBackend> Part<M, B> for Times {
    fn gradients(
        &mut self,
        _: &mut Step<B::InnerBackend>,
        model: &M,
        gradients: GradientsParams,
    ) -> Result<GradientsParams, UpdateError> {
        Ok(map_gradients::<B, M>(model, gradients, |path, gradient| {
            self.paths.push(path.to_owned());
            gradient * self.factor
        }))
    }

    fn updated(&mut self, step: &Step<B::InnerBackend>, _: &M) -> Result<(), UpdateError> {
        assert!(step.updates() && step.norm.is_some());
        assert_eq!(self.paths.split_off(0), PATHS);
        Ok(())
    }
}

/// Whatever the order of the builder's calls: own parts get the mean of the window, clipping what
/// they return.
#[test]
fn own_parts_get_the_gradients_of_a_window_before_they_are_clipped() {
    let sgd = || SgdConfig::new().init::<F32, Net<F32>>();
    let times = || Times {
        factor: 100.0,
        paths: Vec::new(),
    };
    let (before, after) = (Spy::new("before"), Spy::new("after"));
    let clip = ClipNorm::new(0.5).unwrap();
    let norm = clip.norm();
    let mut update = Update::new(sgd())
        .scale(GradScalerConfig::default())
        .unwrap()
        .clip(clip)
        .unwrap()
        .with(before.clone())
        .unwrap()
        .with(times())
        .unwrap()
        .with(after.clone())
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap();
    let start = net::<F32>();
    let mut model = start.clone();
    for step in 0..2 {
        assert!(before.seen().is_empty(), "a micro-batch that waits");
        let gradients = gradients(&model, step, &[]);
        model = update.step(1.0, model, gradients).unwrap();
    }
    let first = |step: usize| ((step * 17) as f32).sin();
    let mean = (first(0) + first(1)) / 2.0;
    assert_eq!(before.seen(), [mean]);
    assert_eq!(after.seen(), [mean * 100.0]);
    assert!(norm.last().unwrap() > 50.0);
    let moved: f32 = crate::support::floats(&model)
        .concat()
        .iter()
        .zip(crate::support::floats(&start).concat())
        .map(|(after, before)| (after - before).powi(2))
        .sum();
    assert!(
        (moved.sqrt() - 0.5).abs() < 1e-5,
        "clipped after the part: {moved}"
    );
}

#[test]
fn own_parts_do_not_see_a_step_that_is_skipped() {
    let spy = Spy::new("spy");
    let mut update = Update::new(adamw())
        .with(spy.clone())
        .unwrap()
        .scale(GradScalerConfig::default())
        .unwrap();
    let mut model = net::<F32>();
    for bad in [&[][..], &[2], &[]] {
        let gradients = gradients(&model, 0, bad);
        model = update.step(LR, model, gradients).unwrap();
    }
    assert_eq!(spy.seen().len(), 2);
    let error = update.with(spy).unwrap_err();
    assert!(matches!(&error, UpdateError::SameName { name } if name == "spy"));
}

/// A clone, as Burn's Learner makes them, has its own state.
#[test]
fn a_clone_goes_on_by_itself() {
    let mut update = Update::new(adamw())
        .clip_norm(1.0)
        .unwrap()
        .accumulate(AccumConfig::mean(2))
        .unwrap();
    let model = net::<F32>();
    let made = |step| gradients(&model, step, &[]);
    let model_1 = update.step(LR, model.clone(), made(0)).unwrap();
    let mut other = update.clone();
    let one = update.step(LR, model_1.clone(), made(1)).unwrap();
    assert_eq!((update.updates(), other.updates()), (1, 0));
    let same = other.step(LR, model_1, made(1)).unwrap();
    assert_eq!(bits(&one), bits(&same));
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

#[test]
fn an_optimizer_that_does_the_work_of_a_part_is_refused() {
    let inner = Update::new(adamw()).accumulate(AccumConfig::mean(2));
    let mut update = Update::new(inner.unwrap());
    let start = net::<F32>();
    let gradients = gradients(&start, 0, &[]);
    let error = update.step(LR, start, gradients).unwrap_err();
    let UpdateError::WrapperInside { what, .. } = error else {
        panic!("{error}");
    };
    assert_eq!(what, "accumulates gradients");
}
